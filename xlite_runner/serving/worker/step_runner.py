"""The serving half of a model runner: one step from the scheduler's words to sampled tokens, in upstream's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from xlite_runner.forward_context import BatchDescriptor, ForwardContext
from xlite_runner.models.attention_metadata import AscendMetadata
from xlite_runner.serving.output import LogprobsLists, ModelRunnerOutput, SchedulerOutput
from xlite_runner.serving.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from xlite_runner.serving.sample.sampler import (
    LogprobsTensors,
    Sampler,
    SamplerOutput,
    compute_logprobs,
    gather_logprobs,
)
from xlite_runner.serving.worker.input_batch import InputBatch
from xlite_runner.serving.worker.request_state import CachedRequestState
from xlite_runner.serving.worker.step_inputs import StepInputBuilder, StepInputs

if TYPE_CHECKING:
    from xlite_runner.runner import NPUModelRunner

EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
PHILOX_INCREMENT = 4
"""By how much a draw advances a generator's offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteModelState:
    """What a step keeps between the forward pass and sampling; tensors live exactly that long."""

    scheduler_output: SchedulerOutput
    inputs: StepInputs
    context: ForwardContext
    logits: torch.Tensor
    hidden_states: torch.Tensor
    sample_hidden_states: torch.Tensor


@dataclass(slots=True)
class _Sampled:
    """A step's tokens on the host."""

    token_ids: list[list[int]]
    logprobs: dict[str, LogprobsLists] = field(default_factory=dict)


class StepRunner:
    """Executes the scheduler's steps on a runner.

    Args:
        runner: Whose model, buffers and metadata are used.

    Attributes:
        requests: All requests that have been announced and have not finished, by id.
        batch: Those of the current step.
    """

    def __init__(self, runner: NPUModelRunner) -> None:
        self._runner = runner
        self.requests: dict[str, CachedRequestState] = {}
        self.batch = InputBatch(runner.config, runner.buffers, runner.device)
        self._inputs = StepInputBuilder(runner.config, runner.buffers, self.batch)
        self.sampler = Sampler(runner.device_type, runner.buffers.batch.neg_inf)
        self.rejection_sampler = RejectionSampler(self.sampler)
        self._state: ExecuteModelState | None = None
        self._draft_token_ids: torch.Tensor | None = None
        self._is_async = runner.config.scheduler.async_scheduling
        self._num_steps = 0

    # ---- the batch

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Bring requests and rows up to date with what is scheduled; on the host alone."""
        self._num_steps += 1
        batch, requests = self.batch, self.requests
        scheduled = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for req_id in scheduler_output.finished_req_ids:
            requests.pop(req_id, None)
            batch.remove_request(req_id)
        # A request that was preempted gives up its row, and gets another when it is resumed.
        for req_id in [r for r in batch.rows if r not in scheduled or r in cached.resumed_req_ids]:
            batch.remove_request(req_id)
        to_add = []
        for data in scheduler_output.scheduled_new_reqs:
            requests[data.req_id] = request = CachedRequestState.of(data, self._runner.device)
            to_add.append(request)
        for req_id, block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = requests[req_id]
            new_block_ids = block_ids or ()
            request.num_computed_tokens = num_computed_tokens
            if req_id in cached.resumed_req_ids:
                request.block_ids = list(new_block_ids)
            else:
                request.block_ids.extend(new_block_ids)
                request.num_computed_tokens -= self._num_rejected_unheard_of(request)
            row = batch.rows.get(req_id)
            if row is None:
                all_token_ids = cached.all_token_ids.get(req_id)
                if all_token_ids is not None:
                    request.output_token_ids = list(all_token_ids[request.num_prompt_tokens :])
                to_add.append(request)
                continue
            batch.num_computed_tokens[row] = request.num_computed_tokens
            if new_block_ids:
                batch.append_blocks(row, new_block_ids)
        for request in to_add:
            batch.add_request(request)
        all_drafts = scheduler_output.scheduled_spec_decode_tokens
        if all_drafts or any(batch.spec_token_ids):
            for req_id, row in batch.rows.items():
                batch.set_spec_tokens(row, self._known_drafts(requests[req_id], all_drafts.get(req_id, ())))
        batch.condense()
        batch.reorder(scheduled, self._runner.config.uniform_decode_query_len)

    def _num_rejected_unheard_of(self, request: CachedRequestState) -> int:
        """Drafts that the last step rejected, when this one had been composed before that was known."""
        step, num_rejected = request.verification
        return num_rejected if self._is_async and step == self._num_steps - 1 else 0

    def _known_drafts(self, request: CachedRequestState, drafts: Sequence[int]) -> Sequence[int]:
        """A step that was composed before its drafts were known has placeholders; where there is no draft, token 0."""
        if PLACEHOLDER_TOKEN_ID not in drafts:
            return drafts
        return [*request.draft_token_ids, *[0] * len(drafts)][: len(drafts)]

    # ---- a step

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model; what it gives is sampled by :meth:`sample_tokens`.

        Returns:
            An empty output if nothing is scheduled, else None.

        Raises:
            RuntimeError: The step before was not sampled; upstream's text. Or xlite's own checks.
        """
        if self._state is not None:
            raise RuntimeError("State error: sample_tokens() must be called after execute_model() returns None.")
        self.update_states(scheduler_output)
        self.batch.refresh_metadata()
        if not scheduler_output.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._run(scheduler_output)
        return None

    @torch.inference_mode()
    def execute_batch(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Execute and sample a step for which :meth:`update_states` was called; see :meth:`execute_model`."""
        self.batch.refresh_metadata()
        if not scheduler_output.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._run(scheduler_output)
        return self.sample_tokens()

    def repeat_batch(self, tokens: Sequence[int], discarded_rows: Sequence[int]) -> ModelRunnerOutput:
        """Do to the batch what :meth:`execute_batch` does, without the device.

        Args:
            tokens: What each row samples.
            discarded_rows: Rows whose token means nothing, since more of their prompt follows.
        """
        sampled = _Sampled([[token_id] for token_id in tokens])
        self._forget_discarded(discarded_rows, sampled)
        return ModelRunnerOutput(sampled_token_ids=self._remember(sampled))

    def _run(self, scheduler_output: SchedulerOutput) -> None:
        runner = self._runner
        inputs = self._inputs.build(scheduler_output.num_scheduled_tokens)
        execution = runner.batch_execution.plan(inputs.num_tokens, uniform_decode=inputs.is_uniform_decode)
        metadata = self._attention_metadata(inputs, execution.descriptor)
        context = runner.make_context(execution, metadata, num_actual_tokens=inputs.num_tokens)
        hidden_states = runner.forward(context)
        sample_hidden_states = hidden_states[inputs.logits_indices]
        logits = runner.model.compute_logits(sample_hidden_states)
        self._state = ExecuteModelState(
            scheduler_output=scheduler_output,
            inputs=inputs,
            context=context,
            logits=logits,
            hidden_states=hidden_states,
            sample_hidden_states=sample_hidden_states,
        )

    def _attention_metadata(self, inputs: StepInputs, descriptor: BatchDescriptor) -> dict[str, AscendMetadata]:
        """Metadata of the batch; a graph's further requests have new tokens, but no sequence."""
        runner = self._runner
        num_reqs = len(inputs.query_lens)
        num_padded_reqs = max(descriptor.num_reqs or 0, num_reqs)
        self._inputs.pad(inputs.num_tokens, descriptor.num_tokens, num_reqs, num_padded_reqs)
        num_padding = num_padded_reqs - num_reqs
        metadata = runner.metadata_builder.build(
            attn_state=inputs.attn_state,
            query_lens=inputs.query_lens + [runner.config.uniform_decode_query_len] * num_padding,
            seq_lens=inputs.seq_lens + [0] * num_padding,
            num_actual_tokens=inputs.num_tokens,
            block_tables=runner.buffers.batch.block_table[:num_padded_reqs],
            slot_mapping=runner.buffers.batch.slot_mapping[: descriptor.num_tokens],
        )
        return dict.fromkeys(runner.attention_layers, metadata)

    @torch.inference_mode()
    def sample_tokens(self) -> ModelRunnerOutput:
        """Sample the step that :meth:`execute_model` ran, and remember the tokens.

        Raises:
            RuntimeError: No step is waiting to be sampled.
        """
        state, self._state = self._state, None
        if state is None:
            raise RuntimeError("State error: execute_model() must be called before sample_tokens().")
        output = self._sample(state)
        sampled = self._to_host(state, output)
        self._forget_discarded(state.inputs.discarded_rows, sampled)
        sampled_token_ids = self._remember(sampled)
        prompt_logprobs = self._prompt_logprobs(state)
        return ModelRunnerOutput(
            sampled_token_ids=sampled_token_ids,
            draft_token_ids=self._propose_drafts(state, sampled.token_ids),
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _remember(self, sampled: _Sampled) -> dict[str, Sequence[int]]:
        """Add a step's tokens to the rows; returns them by request."""
        batch = self.batch
        if all(len(token_ids) == 1 for token_ids in sampled.token_ids):
            batch.append_one_each([token_id for (token_id,) in sampled.token_ids])
        else:
            for row, token_ids in enumerate(sampled.token_ids):
                batch.append_output(row, token_ids)
        for request, drafts, token_ids in zip(batch.requests, batch.spec_token_ids, sampled.token_ids, strict=True):
            if drafts:
                request.verification = self._num_steps, len(drafts) + 1 - len(token_ids)
        return {request.req_id: token_ids for request, token_ids in zip(batch.requests, sampled.token_ids, strict=True)}

    def _propose_drafts(
        self, state: ExecuteModelState, sampled_token_ids: Sequence[Sequence[int]]
    ) -> Mapping[str, Sequence[int]]:
        """Drafts for the next step; none for rows in the middle of their prompt."""
        runner, batch, inputs = self._runner, self.batch, state.inputs
        if runner.drafter is None:
            return {}
        # Upstream's runner keeps them until the next step (exact: vllm-ascend 0.23.0 model_runner_v1.py).
        self._draft_token_ids = runner.drafter.propose(
            inputs,
            sampled_token_ids,
            lambda row: int(batch.token_ids[row, inputs.seq_lens[row]]),
            (runner.buffers.input_ids, runner.buffers.positions, state.hidden_states),
            lambda: self._draft_context(state),
        )
        drafts = self._draft_token_ids.tolist()
        for request, draft, token_ids in zip(batch.requests, drafts, sampled_token_ids, strict=True):
            request.draft_token_ids = [draft] if token_ids else ()
        return {request.req_id: request.draft_token_ids for request in batch.requests if request.draft_token_ids}

    def _draft_context(self, state: ExecuteModelState) -> ForwardContext:
        """As the step's, without padding, over block tables of its own."""
        runner, inputs = self._runner, state.inputs
        metadata = runner.metadata_builder.build(
            attn_state=inputs.attn_state,
            query_lens=inputs.query_lens,
            seq_lens=inputs.seq_lens,
            num_actual_tokens=inputs.num_tokens,
            block_tables=runner.buffers.batch.block_table[: len(inputs.query_lens)].clone(),
            slot_mapping=runner.buffers.batch.slot_mapping,
        )
        return runner.make_draft_context(
            state.context, dict.fromkeys(runner.attention_layers, metadata), inputs.num_tokens
        )

    def _sample(self, state: ExecuteModelState) -> SamplerOutput:
        metadata, spec = self.batch.sampling_metadata, state.inputs.spec_decode
        if spec is None:
            return self.sampler(state.logits, metadata)
        return self.rejection_sampler(state.logits, metadata, spec, self.batch.spec_token_ids)

    def _to_host(self, state: ExecuteModelState, output: SamplerOutput) -> _Sampled:
        """The step's only wait for the device."""
        rows = output.sampled_token_ids.tolist()
        spec = state.inputs.spec_decode
        num_places = [1] * len(rows) if spec is None else (spec.num_draft_tokens + 1).tolist()
        sampled = _Sampled([_until_placeholder(row[:end]) for row, end in zip(rows, num_places, strict=True)])
        if output.logprobs is not None:
            width = output.sampled_token_ids.shape[1]
            lists = _to_lists(output.logprobs)
            for row, token_ids in enumerate(sampled.token_ids):
                request = self.batch.requests[row]
                if request.sampling_params.logprobs is not None:
                    sampled.logprobs[request.req_id] = _rows_of(lists, row * width, row * width + len(token_ids))
        return sampled

    def _forget_discarded(self, rows: Sequence[int], sampled: _Sampled) -> None:
        """Samples in the middle of a prompt are thrown away, and what a generator gave for them is given back."""
        for row in rows:
            sampled.token_ids[row] = []
            request = self.batch.requests[row]
            sampled.logprobs.pop(request.req_id, None)
            if request.generator is not None:
                request.generator.set_offset(request.generator.get_offset() - PHILOX_INCREMENT)

    def _prompt_logprobs(self, state: ExecuteModelState) -> Mapping[str, LogprobsLists]:
        """Of the prompt tokens that this step's tokens are followed by; all of a request's chunk at once."""
        model, device = self._runner.model, self._runner.device
        results = {}
        end = 0
        for request, query_len in zip(self.batch.requests, state.inputs.query_lens, strict=True):
            start, end = end, end + query_len
            num_logprobs = request.sampling_params.prompt_logprobs
            first = request.num_computed_tokens + 1
            num_logits = min(query_len, request.num_prompt_tokens - first)
            if num_logprobs is None or first > request.num_prompt_tokens:
                continue
            # As upstream: the whole prompt goes to the device, and what one request leaves in these variables is there
            # while the next one's logits are computed.
            prompt = torch.tensor(request.prompt_token_ids, dtype=torch.int64, device="cpu").to(
                device, non_blocking=True
            )
            if num_logits <= 0:
                continue
            logits = model.compute_logits(state.hidden_states[start : start + num_logits])
            logprobs = compute_logprobs(logits)
            num_logprobs = logits.shape[1] if num_logprobs == -1 else num_logprobs
            tensors = gather_logprobs(logprobs, num_logprobs, prompt[first : first + num_logits])
            token_ids, logprobs, ranks = tensors.token_ids, tensors.logprobs, tensors.ranks
            del tensors
            results[request.req_id] = LogprobsLists(
                token_ids=token_ids.tolist(), logprobs=logprobs.tolist(), sampled_token_ranks=ranks.tolist()
            )
        return results


def _until_placeholder(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(PLACEHOLDER_TOKEN_ID)] if PLACEHOLDER_TOKEN_ID in token_ids else token_ids


def _to_lists(tensors: LogprobsTensors) -> LogprobsLists:
    return LogprobsLists(
        token_ids=tensors.token_ids.tolist(),
        logprobs=tensors.logprobs.tolist(),
        sampled_token_ranks=tensors.ranks.tolist(),
    )


def _rows_of(lists: LogprobsLists, start: int, end: int) -> LogprobsLists:
    return LogprobsLists(
        token_ids=lists.token_ids[start:end],
        logprobs=lists.logprobs[start:end],
        sampled_token_ranks=lists.sampled_token_ranks[start:end],
    )
