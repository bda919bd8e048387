"""From logits to tokens: vllm-ascend's sampler on A2 and A3, tensor by tensor, since each is as large as the logits.

Order of vLLM 0.23.0: allowed tokens, minimal lengths, penalties, greedy choice, temperature, min-p, top-k and top-p,
softmax, noise, choice. On A5 and 310P upstream filters by torch's own operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch_npu

from xlite_runner.forward_context import AscendDeviceType
from xlite_runner.serving.sample.penalties import apply_penalties
from xlite_runner.serving.sample.sampling_metadata import SamplingMetadata
from xlite_runner.serving.sampling_params import SAMPLING_EPS


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Log probabilities on the device.

    Attributes:
        token_ids: [rows, most probable tokens + 1] int32, the chosen token first.
        logprobs: float32, likewise.
        ranks: Of the chosen token, [rows] int64.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Tokens on the device, [rows, tokens] int32, and their log probabilities if any row asked."""

    sampled_token_ids: torch.Tensor
    logprobs: LogprobsTensors | None = None


class Sampler:
    """Samples one token for each row of logits.

    Args:
        device_type: Decides which operators filter.

    Attributes:
        neg_inf: Scalar on the device, written to forbidden tokens.
    """

    def __init__(self, device_type: AscendDeviceType, neg_inf: torch.Tensor) -> None:
        self._filters_fused = device_type in (AscendDeviceType.A2, AscendDeviceType.A3)
        self.neg_inf = neg_inf
        self._side_stream: torch_npu.npu.Stream | None = None

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """The next tokens.

        Args:
            logits: [rows, vocabulary] in the model's dtype.
            metadata: Of these rows.
        """
        # Of the logits as they are; upstream's default mode "raw_logprobs".
        raw_logprobs = None if metadata.max_num_logprobs is None else compute_logprobs(logits)
        logits = logits.to(torch.float32)
        penalties = metadata.penalties
        self.apply_logits_processors(logits, metadata, penalties.output_token_ids if penalties else ())
        sampled = self.sample(logits, metadata)
        logprobs = None
        if raw_logprobs is not None:
            assert metadata.max_num_logprobs is not None
            logprobs = gather_logprobs(raw_logprobs, metadata.max_num_logprobs, sampled)
        return SamplerOutput(sampled.to(torch.int32).unsqueeze(-1), logprobs)

    def apply_logits_processors(
        self, logits: torch.Tensor, metadata: SamplingMetadata, output_token_ids: Sequence[Sequence[int]]
    ) -> None:
        """What can change the most probable token; in place on float32 logits."""
        if metadata.allowed_token_ids_mask is not None:
            logits.masked_fill_(metadata.allowed_token_ids_mask, -float("inf"))
        if metadata.min_tokens is not None and metadata.min_tokens.forbidden is not None:
            logits.index_put_(metadata.min_tokens.forbidden, self.neg_inf)
        if metadata.penalties is not None:
            apply_penalties(logits, metadata.penalties, output_token_ids)

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Tokens, [rows] int64; changes the float32 logits."""
        greedy = None
        if not metadata.all_random:
            greedy = logits.argmax(dim=-1)
            if metadata.all_greedy:
                return greedy
        temperature = metadata.temperature
        assert temperature is not None
        divisor = temperature if greedy is None else torch.where(temperature < SAMPLING_EPS, 1.0, temperature)
        logits.div_(divisor.unsqueeze(1))
        del divisor
        if metadata.min_p is not None:
            apply_min_p(logits, metadata.min_p)
        sampled = self._sample_random(logits, metadata)
        return sampled if greedy is None else torch.where(temperature < SAMPLING_EPS, greedy, sampled, out=greedy)

    def _sample_random(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        # The caller holds its logits beside the filtered ones.
        logits = self.filter(logits, metadata.top_k, metadata.top_p)
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        current = torch_npu.npu.current_stream()
        if self._side_stream is None:
            self._side_stream = torch_npu.npu.Stream()
        # What the side stream allocates is of its pool, which no other stream gets memory from.
        with torch_npu.npu.stream(self._side_stream):
            noise = exponential_noise(probs, metadata.generators)
        current.wait_stream(self._side_stream)
        return probs.div_(noise).argmax(dim=-1)

    def filter(self, logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
        """Logits of tokens outside of top-k and top-p at minus infinity: in new memory by the fused operator."""
        if top_k is None and top_p is None:
            return logits
        if self._filters_fused:
            filtered: torch.Tensor = torch_npu.npu_top_k_top_p(logits, top_p, top_k)
            return filtered
        return _filter_by_torch(logits, top_k, top_p)


def exponential_noise(probs: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """Exponential random numbers for each probability; rows with a generator take theirs from it.

    Those rows are drawn twice, unless all rows have generators.
    """
    noise = torch.empty_like(probs)
    if len(generators) != probs.shape[0]:
        noise.exponential_()
    for row, generator in generators.items():
        noise[row].exponential_(generator=generator)
    return noise


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Forbid tokens whose probability is below ``min_p`` times that of the most probable one; in place."""
    probs = logits.softmax(dim=-1)
    limit = probs.amax(dim=-1, keepdim=True).mul_(min_p)
    logits.masked_fill_(probs < limit, -float("inf"))


def _filter_by_torch(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Upstream's filter on A5 and 310P, in place. Like upstream's, it keeps the sort's indices to the end."""
    probs = logits.softmax(dim=-1)
    probs_sort, _indices = probs.sort(dim=-1, descending=False)
    if top_k is not None:
        last = (probs_sort.shape[1] - top_k.to(torch.int64)).unsqueeze(1)
        cutoff = probs_sort.gather(-1, last)
        cutoff.masked_fill_((top_k == logits.shape[1]).unsqueeze(1), -float("inf"))
        discarded = probs < cutoff
        logits.masked_fill_(discarded, -float("inf"))
    if top_p is not None:
        cumulative = probs_sort.cumsum(dim=-1)
        is_tail = cumulative <= 1 - top_p.unsqueeze(1)
        is_tail[:, -1] = False
        cutoff = probs_sort.gather(-1, is_tail.sum(dim=-1).unsqueeze(1))
        discarded_tail = probs < cutoff
        logits.masked_fill_(discarded_tail, -float("inf"))
    return logits


def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Log probabilities in float32."""
    return logits.log_softmax(dim=-1, dtype=torch.float32)


def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """Log probability and rank of a token of each row, and the most probable tokens of the row.

    Args:
        logprobs: [rows, vocabulary].
        num_logprobs: Most probable tokens.
        token_ids: [rows] int64.
    """
    top_logprobs, top_ids = logprobs.topk(num_logprobs, dim=-1)
    token_ids = token_ids.unsqueeze(-1)
    token_logprobs = logprobs.gather(-1, token_ids)
    ranks = (logprobs >= token_logprobs).sum(-1)
    ids = torch.cat((token_ids, top_ids), dim=1)
    logprobs = torch.cat((token_logprobs, top_logprobs), dim=1)  # as upstream, beside the ids in int64
    return LogprobsTensors(ids.to(torch.int32), logprobs, ranks)
