"""The persistent batch: one row per scheduled request, kept from step to step, rows without gaps.

Host memory, with the buffers that go to the device as :class:`HostTwin`. Rows and their order are those of vLLM's
``InputBatch``: a new request takes the lowest free row, and what is behind a gap moves into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlite_runner.config import RunnerConfig
from xlite_runner.input_buffers import InputBuffers
from xlite_runner.serving.sample.sampling_metadata import MinTokens, Penalties, SamplingMetadata
from xlite_runner.serving.worker.host_twin import HostTwin, to_device
from xlite_runner.serving.worker.request_state import CachedRequestState


class InputBatch:
    """Requests of the current step by row.

    Args:
        config: The engine's configuration.
        buffers: The device's side.
        device: Where further tensors go.

    Attributes:
        requests: By row.
        rows: Row by request id.
        token_ids: [max_num_seqs, max_model_len] int32: prompt, output and, behind them, scheduled drafts.
        num_tokens: Prompt and output tokens, by row.
        num_prompt_tokens: By row.
        num_computed_tokens: Tokens in the cache before the step, by row.
        spec_token_ids: Scheduled drafts by row.
        sampling_metadata: Of the rows as they are; see :meth:`refresh_metadata`.
    """

    def __init__(self, config: RunnerConfig, buffers: InputBuffers, device: torch.device) -> None:
        num_rows = config.scheduler.max_num_seqs
        self._device = device
        self._vocab_size = config.model.vocab_size
        self._eos_token_ids: tuple[int, ...] = config.model.eos_token_ids
        self.requests: list[CachedRequestState] = []
        self.rows: dict[str, int] = {}
        self.spec_token_ids: list[Sequence[int]] = []
        self.token_ids: NDArray[Any] = np.zeros((num_rows, config.scheduler.max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int32)
        self.num_computed_tokens_twin = HostTwin(buffers.num_computed_tokens)
        self.num_computed_tokens = self.num_computed_tokens_twin.np
        self.block_table = HostTwin(buffers.batch.block_table)
        self.temperature = HostTwin(buffers.batch.temperature)
        self.top_p = HostTwin(buffers.batch.top_p)
        self.top_k = HostTwin(buffers.batch.top_k)
        self.min_p = HostTwin(buffers.batch.min_p)
        self.frequency_penalties = HostTwin(buffers.batch.frequency_penalties)
        self.presence_penalties = HostTwin(buffers.batch.presence_penalties)
        self.repetition_penalties = HostTwin(buffers.batch.repetition_penalties)
        self._allowed_token_ids: HostTwin | None = None
        parameters = (self.temperature, self.top_p, self.top_k, self.min_p)
        penalties = (self.frequency_penalties, self.presence_penalties, self.repetition_penalties)
        counts = (self.num_tokens, self.num_prompt_tokens, self.num_blocks, self.num_computed_tokens)
        self._neutral = [(self.temperature, 0), (self.top_p, 1), (self.top_k, self._vocab_size), (self.min_p, 0)]
        self._neutral += zip(penalties, (0, 0, 1), strict=True)
        self._columns: tuple[NDArray[Any], ...] = (*counts, *(twin.np for twin in (*parameters, *penalties)))
        self._free_rows: list[int] = []
        self._only_decodes = False
        self._changed = False
        self.sampling_metadata = SamplingMetadata(all_greedy=True, all_random=False)

    @property
    def num_reqs(self) -> int:
        """Rows in use."""
        return len(self.rows)

    # ---- rows

    def add_request(self, request: CachedRequestState) -> None:
        """Give a request the lowest free row."""
        row = self._free_rows.pop(0) if self._free_rows else len(self.requests)
        if row == len(self.requests):
            self.requests.append(request)
            self.spec_token_ids.append(())
        else:
            self.requests[row] = request
            self.spec_token_ids[row] = ()
        self.rows[request.req_id] = row
        num_prompt_tokens = request.num_prompt_tokens
        self.token_ids[row, :num_prompt_tokens] = request.prompt_token_ids
        self.token_ids[row, num_prompt_tokens : request.num_tokens] = request.output_token_ids
        self.num_tokens[row] = request.num_tokens
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.block_table.np[row] = 0
        self.num_blocks[row] = 0
        self.append_blocks(row, request.block_ids)
        self._set_sampling_params(row, request)
        self._changed = True

    def append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks to a row's table."""
        start = self.num_blocks[row]
        self.block_table.np[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)

    def _set_sampling_params(self, row: int, request: CachedRequestState) -> None:
        params = request.sampling_params
        is_greedy = params.is_greedy  # then the filters count as not given
        self.temperature.np[row] = params.effective_temperature
        self.top_p.np[row] = 1.0 if is_greedy else params.top_p
        keeps_all = is_greedy or not 0 < params.top_k < self._vocab_size
        self.top_k.np[row] = self._vocab_size if keeps_all else params.top_k
        self.min_p.np[row] = 0.0 if is_greedy else params.min_p
        self.frequency_penalties.np[row] = params.frequency_penalty
        self.presence_penalties.np[row] = params.presence_penalty
        self.repetition_penalties.np[row] = params.repetition_penalty
        if params.allowed_token_ids is not None:
            # Made when the first request asks for it, for good (exact: vLLM 0.23.0 gpu_input_batch.py).
            if self._allowed_token_ids is None:
                shape = (len(self.num_tokens), self._vocab_size)
                self._allowed_token_ids = HostTwin(torch.zeros(shape, dtype=torch.bool, device=self._device))
            self._allowed_token_ids.np[row] = True
            self._allowed_token_ids.np[row, list(params.allowed_token_ids)] = False
        elif self._allowed_token_ids is not None:
            self._allowed_token_ids.np[row] = False

    def remove_request(self, req_id: str) -> None:
        """Free a request's row; :meth:`condense` has to follow. Nothing happens if it has none."""
        row = self.rows.pop(req_id, None)
        if row is None:
            return
        self._free_rows.append(row)
        self._free_rows.sort()
        self.spec_token_ids[row] = ()
        self._clear_blocks(row)
        self._changed = True

    def _clear_blocks(self, row: int) -> None:
        """Rows without a request name block 0, the null block, which dummy steps read and write."""
        self.block_table.np[row] = 0
        self.num_blocks[row] = 0

    def condense(self) -> None:
        """Close the gaps that removed requests left."""
        num_reqs = self.num_reqs
        last = len(self.requests) - 1
        for row in self._free_rows:
            while last in self._free_rows:
                last -= 1
            if row >= last:
                break
            self._move(last, row)
            last -= 1
        self._free_rows.clear()
        del self.requests[num_reqs:], self.spec_token_ids[num_reqs:]

    def _move(self, source: int, target: int) -> None:
        request = self.requests[source]
        self.requests[target], self.spec_token_ids[target] = request, self.spec_token_ids[source]
        self.rows[request.req_id] = target
        end = self.num_tokens[source] + len(self.spec_token_ids[source])
        self.token_ids[target, :end] = self.token_ids[source, :end]
        self.block_table.np[target] = self.block_table.np[source]
        if self._allowed_token_ids is not None:
            self._allowed_token_ids.np[target] = self._allowed_token_ids.np[source]
        for column in self._columns:
            column[target] = column[source]
        self._clear_blocks(source)

    def swap(self, first: int, second: int) -> None:
        """Exchange two rows."""
        pair, reverse = [first, second], [second, first]
        self.requests[first], self.requests[second] = self.requests[second], self.requests[first]
        drafts = self.spec_token_ids
        drafts[first], drafts[second] = drafts[second], drafts[first]
        for row in pair:
            self.rows[self.requests[row].req_id] = row
        end = max(self.num_tokens[row] + len(self.spec_token_ids[row]) for row in pair)
        self.token_ids[pair, :end] = self.token_ids[reverse, :end]
        self.block_table.np[pair] = self.block_table.np[reverse]
        if self._allowed_token_ids is not None:
            self._allowed_token_ids.np[pair] = self._allowed_token_ids.np[reverse]
        for column in self._columns:
            column[pair] = column[reverse]
        self._changed = True

    def reorder(self, num_scheduled_tokens: Mapping[str, int], decode_threshold: int) -> None:
        """Decodes first, then ends of prompts of at most as many tokens, then other continued prompts, then new ones.

        Rows that are in their region already stay where they are.
        """
        if (
            self._only_decodes
            and not self._changed
            and max(num_scheduled_tokens.values(), default=0) <= decode_threshold
        ):
            return  # the same rows again, each behind its prompt
        regions = self._regions(num_scheduled_tokens, decode_threshold)
        self._only_decodes = not regions.any()
        misplaced = np.flatnonzero(regions != np.sort(regions))
        sources = misplaced[np.argsort(regions[misplaced], kind="stable")]
        moves = dict(zip(sources.tolist(), misplaced.tolist(), strict=True))
        for source in moves:
            target = moves[source]
            while source != target:
                self.swap(source, target)
                following = moves[target]
                moves[target] = target
                target = following

    def _regions(self, num_scheduled_tokens: Mapping[str, int], decode_threshold: int) -> NDArray[Any]:
        scheduled = np.array([num_scheduled_tokens[request.req_id] for request in self.requests])
        num_computed = self.num_computed_tokens[: self.num_reqs]
        is_short = scheduled <= decode_threshold
        is_done = num_computed >= self.num_prompt_tokens[: self.num_reqs]
        conditions = [num_computed == 0, ~is_short, ~is_done]
        return np.select(conditions, [3, 2, 1], default=0)

    # ---- tokens

    def set_spec_tokens(self, row: int, token_ids: Sequence[int]) -> None:
        """Put the drafts that a step verifies behind a row's tokens."""
        self.spec_token_ids[row] = token_ids
        if token_ids:
            start = self.num_tokens[row]
            self.token_ids[row, start : start + len(token_ids)] = token_ids

    def append_output(self, row: int, token_ids: Sequence[int]) -> None:
        """Add sampled tokens to a row and its request."""
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)
        self.requests[row].output_token_ids.extend(token_ids)

    def append_one_each(self, token_ids: Sequence[int]) -> None:
        """Add one sampled token to each row and its request."""
        num_reqs = self.num_reqs
        ends = self.num_tokens[:num_reqs]
        self.token_ids[np.arange(num_reqs), ends] = token_ids
        ends += 1
        for request, token_id in zip(self.requests, token_ids, strict=True):
            request.output_token_ids.append(token_id)

    # ---- sampling metadata

    def refresh_metadata(self) -> None:
        """Bring :attr:`sampling_metadata` up to date, if rows have changed since; and what depends on their output."""
        if self._changed:
            self._changed = False
            self.sampling_metadata = self._make_sampling_metadata()
        if self.sampling_metadata.min_tokens is not None:
            self.sampling_metadata.min_tokens.refresh(self._device)

    @property
    def must_upload_metadata(self) -> bool:
        """Whether :meth:`refresh_metadata` would copy something to the device."""
        if not self._changed:
            return False
        num_reqs = self.num_reqs
        return any((twin.np[:num_reqs] != neutral).any() for twin, neutral in self._neutral) or any(
            request.sampling_params.allowed_token_ids is not None for request in self.requests
        )

    def _make_sampling_metadata(self) -> SamplingMetadata:
        num_reqs = self.num_reqs
        params = [request.sampling_params for request in self.requests]
        is_greedy = self.temperature.np[:num_reqs] == 0
        logprobs = [self._vocab_size if p.logprobs == -1 else p.logprobs for p in params if p.logprobs is not None]
        generators = {row: r.generator for row, r in enumerate(self.requests) if r.generator is not None}

        def uploaded(twin: HostTwin, neutral: float) -> torch.Tensor | None:
            return twin.upload(num_reqs) if (twin.np[:num_reqs] != neutral).any() else None

        min_p = uploaded(self.min_p, 0)
        restricted = self._allowed_token_ids is not None and any(p.allowed_token_ids is not None for p in params)
        return SamplingMetadata(
            all_greedy=bool(is_greedy.all()),
            all_random=not is_greedy.any(),
            temperature=uploaded(self.temperature, 0),
            top_p=uploaded(self.top_p, 1),
            top_k=uploaded(self.top_k, self._vocab_size),
            min_p=None if min_p is None else min_p.unsqueeze(1),
            generators=generators,
            max_num_logprobs=max(logprobs, default=None),
            penalties=self._make_penalties(),
            allowed_token_ids_mask=self._allowed_token_ids.upload(num_reqs)
            if restricted and self._allowed_token_ids is not None
            else None,
            min_tokens=self._make_min_tokens(),
        )

    def _make_penalties(self) -> Penalties | None:
        num_reqs = self.num_reqs
        twins = (self.frequency_penalties, self.presence_penalties, self.repetition_penalties)
        if all((twin.np[:num_reqs] == neutral).all() for twin, neutral in zip(twins, (0, 0, 1), strict=True)):
            return None
        frequency, presence, repetition = (twin.upload(num_reqs) for twin in twins)
        lengths = self.num_prompt_tokens[:num_reqs]
        prompts = self.token_ids[:num_reqs, : lengths.max()].astype(np.int64)
        prompts[np.arange(prompts.shape[1]) >= lengths[:, None]] = self._vocab_size
        return Penalties(
            prompt_token_ids=to_device(prompts, self._device),
            frequency=frequency,
            presence=presence,
            repetition=repetition,
            output_token_ids=[request.output_token_ids for request in self.requests],
        )

    def _make_min_tokens(self) -> MinTokens | None:
        params = {row: r.sampling_params for row, r in enumerate(self.requests) if r.sampling_params.min_tokens}
        if not params:
            return None
        tokens = range(self._vocab_size)  # others never come, and upstream lets them be asked for
        return MinTokens(
            stop_token_ids={
                row: sorted(token_id for token_id in {*p.stop_token_ids, *self._eos_token_ids} if token_id in tokens)
                for row, p in params.items()
            },
            min_tokens={row: p.min_tokens for row, p in params.items()},
            output_token_ids=[request.output_token_ids for request in self.requests],
        )
