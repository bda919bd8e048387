"""Verifying draft tokens: which are kept, and what comes instead of the first that is not, or after the last.

Stages and tensors of vllm-ascend's rejection sampler with Triton: the token after all drafts is sampled first, then the
logits behind each draft are filtered and compared. The drafter gives tokens without probabilities, so a draft is kept
with the probability that the target model gives it. The kernels that compare take no memory; the operators that stand
for them here work on [rows, drafts], or in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlite_runner.serving.sample.penalties import apply_penalties
from xlite_runner.serving.sample.sampler import (
    LogprobsTensors,
    Sampler,
    SamplerOutput,
    compute_logprobs,
    gather_logprobs,
)
from xlite_runner.serving.sample.sampling_metadata import SamplingMetadata, uploaded_places
from xlite_runner.serving.worker.host_twin import to_device
from xlite_runner.serving.worker.step_inputs import SpecDecodeMetadata

PLACEHOLDER_TOKEN_ID = -1
"""Stands where a row has no token."""


class RejectionSampler:
    """Samples one to all drafts plus one tokens for each row.

    Args:
        sampler: Samples the token after all drafts, and knows the filters.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        spec: SpecDecodeMetadata,
        spec_token_ids: Sequence[Sequence[int]],
    ) -> SamplerOutput:
        """The next tokens, [rows, drafts + 1] int32; :data:`PLACEHOLDER_TOKEN_ID` behind a row's last.

        Args:
            logits: Of all drafts and bonus tokens, row after row, in the model's dtype.
            metadata: Of the rows.
            spec: Which of the logits are for what.
            spec_token_ids: The drafts by row, on the host.
        """
        bonus_logits = logits[spec.bonus_logits_indices]
        # Raw logits of the bonus tokens stay to the end, asked for or not (exact: vllm-ascend 0.23.0).
        raw_bonus_logits = bonus_logits.to(torch.float32)
        bonus_token_ids = self._sample_bonus(bonus_logits, metadata, spec_token_ids)
        raw_target_logits = logits[spec.target_logits_indices].to(torch.float32)
        target_logits = raw_target_logits.clone()
        limits = torch.finfo(torch.float32)
        target_logits = torch.nan_to_num(target_logits, nan=0.0, posinf=limits.max, neginf=limits.min)
        self._process_targets(target_logits, metadata, spec, spec_token_ids)
        if not metadata.all_greedy:
            target_logits = self._constrain(target_logits, metadata, spec)
        sampled = _verify(target_logits, metadata, spec, bonus_token_ids)
        logprobs = None
        if metadata.max_num_logprobs is not None:
            logprobs = _logprobs(metadata.max_num_logprobs, spec, logits, raw_target_logits, raw_bonus_logits, sampled)
        return SamplerOutput(sampled, logprobs)

    def _sample_bonus(
        self, bonus_logits: torch.Tensor, metadata: SamplingMetadata, spec_token_ids: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        logits = bonus_logits.to(torch.float32)
        penalties = metadata.penalties
        outputs = (
            [[*ids, *drafts] for ids, drafts in zip(penalties.output_token_ids, spec_token_ids, strict=True)]
            if penalties
            else ()
        )
        self._sampler.apply_logits_processors(logits, metadata, outputs)
        return self._sampler.sample(logits, metadata).to(torch.int32)

    def _process_targets(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        spec: SpecDecodeMetadata,
        spec_token_ids: Sequence[Sequence[int]],
    ) -> None:
        """What can change the most probable token, for the logits behind drafts; in place."""
        rows = to_device(spec.draft_rows, logits.device)
        if metadata.penalties is not None:
            outputs = [
                [*ids, *drafts[:place]]
                for ids, drafts in zip(metadata.penalties.output_token_ids, spec_token_ids, strict=True)
                for place in range(len(drafts))
            ]
            apply_penalties(logits, metadata.penalties, outputs, rows)
        if metadata.allowed_token_ids_mask is not None:
            logits.masked_fill_(metadata.allowed_token_ids_mask[rows], -float("inf"))
        if metadata.min_tokens is not None:
            target_rows, tokens = _places_behind_drafts(metadata, spec)
            if target_rows:
                logits.index_put_(uploaded_places(target_rows, tokens, logits.device), self._sampler.neg_inf)

    def _constrain(self, logits: torch.Tensor, metadata: SamplingMetadata, spec: SpecDecodeMetadata) -> torch.Tensor:
        """Temperature and filters, for the logits behind drafts."""
        assert metadata.temperature is not None
        rows = to_device(spec.draft_rows, logits.device)
        temperature = metadata.temperature[rows]
        logits.div_(temperature.masked_fill(temperature == 0, 1).unsqueeze(-1))
        return self._sampler.filter(
            logits,
            None if metadata.top_k is None else metadata.top_k[rows],
            None if metadata.top_p is None else metadata.top_p[rows],
        )


def _places_behind_drafts(metadata: SamplingMetadata, spec: SpecDecodeMetadata) -> tuple[list[int], list[int]]:
    """Rows of target logits, and tokens in them, that minimal lengths forbid."""
    minimum = metadata.min_tokens
    assert minimum is not None
    starts = [0, *accumulate(spec.num_draft_tokens.tolist())]
    rows: list[int] = []
    tokens: list[int] = []
    for row, token_ids in minimum.stop_token_ids.items():
        missing = minimum.min_tokens[row] - len(minimum.output_token_ids[row])
        for place in range(min(missing, int(spec.num_draft_tokens[row]))):
            rows.extend([starts[row] + place] * len(token_ids))
            tokens.extend(token_ids)
    return rows, tokens


def _verify(
    target_logits: torch.Tensor,
    metadata: SamplingMetadata,
    spec: SpecDecodeMetadata,
    bonus_token_ids: torch.Tensor,
) -> torch.Tensor:
    """Compare drafts and put together each row's tokens, [rows, drafts + 1] int32."""
    num_rows, num_places = len(spec.num_draft_tokens), int(spec.num_draft_tokens.max()) + 1
    output = torch.empty(num_rows, num_places, dtype=torch.int32, device=target_logits.device)
    output.fill_(PLACEHOLDER_TOKEN_ID)
    is_greedy = None if metadata.temperature is None else metadata.temperature == 0
    is_kept, instead = None, None
    if not metadata.all_random:
        instead = target_logits.argmax(dim=-1)
        is_kept = instead == spec.draft_token_ids
    if not metadata.all_greedy:
        assert is_greedy is not None
        is_kept_random, recovered = _verify_random(target_logits, metadata, spec)
        if is_kept is None or instead is None:
            is_kept, instead = is_kept_random, recovered
        else:
            of_greedy_row = is_greedy[to_device(spec.draft_rows, target_logits.device)]
            is_kept = torch.where(of_greedy_row, is_kept, is_kept_random)
            instead = torch.where(of_greedy_row, instead, recovered)
    assert is_kept is not None
    assert instead is not None
    return _assemble(output, is_kept, instead.to(torch.int32), spec, bonus_token_ids)


def _verify_random(
    target_logits: torch.Tensor, metadata: SamplingMetadata, spec: SpecDecodeMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which drafts are kept, and for each a token from the rest of the target's distribution."""
    probs = target_logits.softmax(dim=-1, dtype=torch.float32)
    uniform = torch.rand(len(spec.draft_rows), dtype=torch.float64, device=probs.device)
    for row, generator in metadata.generators.items():
        drafts = np.flatnonzero(spec.draft_rows == row)
        if len(drafts):
            uniform[drafts[0] : drafts[-1] + 1].uniform_(generator=generator)
    noise = _of_drafts(_noise_of_rows(probs, metadata, spec), spec.draft_rows)
    drafts_2d = spec.draft_token_ids.to(torch.int64).unsqueeze(-1)
    is_kept = probs.gather(-1, drafts_2d).squeeze(-1) >= uniform.to(torch.float32)
    recovered = probs.scatter_(-1, drafts_2d, 0).div_(noise).argmax(dim=-1)
    return is_kept, recovered


def _noise_of_rows(probs: torch.Tensor, metadata: SamplingMetadata, spec: SpecDecodeMetadata) -> torch.Tensor:
    """Exponential random numbers for each row of the batch, with drafts or without (exact: vllm-ascend 0.23.0)."""
    noise = torch.empty(len(spec.num_draft_tokens), probs.shape[1], dtype=torch.float32, device=probs.device)
    noise.exponential_()
    has_drafts = to_device(spec.num_draft_tokens, probs.device) > 0
    for row, generator in metadata.generators.items():
        own = torch.empty_like(noise[row]).exponential_(generator=generator)
        noise[row] = torch.where(has_drafts[row], own, noise[row])
    return noise


def _of_drafts(of_rows: torch.Tensor, draft_rows: NDArray[Any]) -> torch.Tensor:
    """A row for each draft: a view if they follow each other, else a copy; upstream's kernel reads them in place."""
    first = int(draft_rows[0])
    if np.array_equal(draft_rows, np.arange(first, first + len(draft_rows))):
        return of_rows[first : first + len(draft_rows)]
    return of_rows[to_device(draft_rows, of_rows.device)]


def _assemble(
    output: torch.Tensor,
    is_kept: torch.Tensor,
    instead: torch.Tensor,
    spec: SpecDecodeMetadata,
    bonus_token_ids: torch.Tensor,
) -> torch.Tensor:
    """Write each row's kept drafts, then one more token, into ``output`` of placeholders."""
    device = is_kept.device
    num_rows, num_places = output.shape
    starts = np.cumsum(spec.num_draft_tokens) - spec.num_draft_tokens
    places = np.arange(len(spec.draft_rows)) - starts[spec.draft_rows]
    drafts = to_device(spec.draft_rows * num_places + places, device)
    bonus = to_device(np.arange(num_rows) * num_places + spec.num_draft_tokens, device)
    kept = torch.zeros(num_rows * num_places, dtype=torch.int32, device=device)
    kept[drafts] = is_kept.to(torch.int32)
    tokens = output.view(-1)
    tokens[drafts] = torch.where(is_kept, spec.draft_token_ids, instead)
    tokens[bonus] = bonus_token_ids
    all_before = torch.ones(num_rows, num_places, dtype=torch.int32, device=device)
    all_before[:, 1:] = kept.view(num_rows, num_places)[:, :-1].cumprod(dim=1).to(torch.int32)
    return output.masked_fill_(all_before == 0, PLACEHOLDER_TOKEN_ID)


def _logprobs(
    num_logprobs: int,
    spec: SpecDecodeMetadata,
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    bonus_logits: torch.Tensor,
    sampled: torch.Tensor,
) -> LogprobsTensors:
    """Of every place of every row, those without a token included; raw logits are put back into the batch's order."""
    # All of these live until the end, as in upstream's frame.
    starts = torch.zeros_like(spec.cu_num_sampled_tokens)
    starts[1:] = spec.cu_num_sampled_tokens[:-1]
    final_logits = torch.zeros_like(logits, dtype=torch.float32)
    final_logits[spec.target_logits_indices] = target_logits
    final_logits[spec.bonus_logits_indices] = bonus_logits
    offsets = torch.arange(sampled.shape[1], dtype=torch.int32, device=logits.device)
    places = (starts.unsqueeze(1) + offsets).flatten()
    places.clamp_(max=len(logits) - 1)
    token_ids = sampled.clone().flatten()
    token_ids[token_ids == PLACEHOLDER_TOKEN_ID] = 0
    of_places = final_logits[places]
    return gather_logprobs(compute_logprobs(of_places), num_logprobs, token_ids.to(torch.int64))
