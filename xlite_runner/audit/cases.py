"""The worst steps that a configuration admits.

Requests are made up: their blocks are any blocks of the cache, over and over, since no value is looked at. So a step of
requests of maximum length needs no cache of that size.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Protocol

from xlite_runner.config import RunnerConfig
from xlite_runner.config.engine_args import AuditArgs
from xlite_runner.forward_context import mc2_tokens_capacity
from xlite_runner.serving.output import CachedRequestData, NewRequestData, SchedulerOutput
from xlite_runner.serving.sampling_params import SamplingParams

if TYPE_CHECKING:
    from xlite_runner.worker import NPUWorker

GREEDY = SamplingParams(temperature=0)
MAX_LOGPROBS = 20
"""Most log probabilities that a client may ask for (exact: vLLM 0.23.0, ``--max-logprobs``)."""


class AuditCase(Protocol):
    """Something that serving does, to be measured.

    Attributes:
        name: For a table.
        excess: What it is that has not been reserved, if the tensors of the case's peak exceed the profile's.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def excess(self) -> str: ...  # noqa: D102

    def run(self, worker: NPUWorker, num_blocks: int) -> None:
        """Do it on a worker whose KV cache has ``num_blocks`` blocks; leaves no request behind."""
        ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of requests that are all alike, from their admission on.

    Attributes:
        num_reqs: Requests in the step.
        num_new_tokens: New tokens of all requests together, in equal shares, the last with the rest.
        num_cached_tokens: Tokens of each request that the cache already holds.
        sampling_params: Of each request.
        num_draft_tokens: After the admission, a second step checks so many draft tokens of each request.
        idle_dp_ranks: All data-parallel ranks but the first have no request.
    """

    name: str
    excess: str
    num_reqs: int
    num_new_tokens: int
    num_cached_tokens: int = 0
    sampling_params: SamplingParams = GREEDY
    num_draft_tokens: int = 0
    idle_dp_ranks: bool = False

    def run(self, worker: NPUWorker, num_blocks: int) -> None:
        """Execute the step, or what an idle rank executes meanwhile; then the requests end."""
        is_idle = self.idle_dp_ranks and worker.model_runner.parallel.dp.rank_in_group > 0
        for output in self.scheduler_outputs(num_blocks, worker.config.cache.block_size):
            if is_idle and output.total_num_scheduled_tokens:
                worker.execute_dummy_batch()
            elif not is_idle:
                worker.execute_model(output)

    def scheduler_outputs(self, num_blocks: int, block_size: int) -> Iterator[SchedulerOutput]:
        """The admission, the step with draft tokens if there are any, and the end of all requests.

        Args:
            num_blocks: Blocks of the cache; block 0 belongs to no request.
            block_size: Tokens of a block.
        """
        req_ids = [f"{self.name}-{index}" for index in range(self.num_reqs)]
        share, rest = divmod(self.num_new_tokens, self.num_reqs)
        new_tokens = dict.fromkeys(req_ids, share)
        new_tokens[req_ids[-1]] += rest
        longest = self.num_cached_tokens + share + rest
        prompt = array("i", bytes(longest * array("i").itemsize))
        num_blocks_needed = -(-(longest + 1 + self.num_draft_tokens) // block_size)
        blocks = tuple(islice(cycle(range(1, max(num_blocks, 2))), num_blocks_needed))
        yield SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=req_id,
                    prompt_token_ids=prompt[: self.num_cached_tokens + num_new],
                    sampling_params=self.sampling_params,
                    block_ids=blocks,
                    num_computed_tokens=self.num_cached_tokens,
                )
                for req_id, num_new in new_tokens.items()
            ],
            num_scheduled_tokens=new_tokens,
        )
        if self.num_draft_tokens:
            yield SchedulerOutput(
                scheduled_cached_reqs=CachedRequestData(
                    req_ids=req_ids,
                    new_block_ids=[None] * self.num_reqs,
                    num_computed_tokens=[self.num_cached_tokens + num_new for num_new in new_tokens.values()],
                    num_output_tokens=[1] * self.num_reqs,
                ),
                num_scheduled_tokens=dict.fromkeys(req_ids, 1 + self.num_draft_tokens),
                scheduled_spec_decode_tokens=dict.fromkeys(req_ids, [0] * self.num_draft_tokens),
            )
        yield SchedulerOutput(finished_req_ids=frozenset(req_ids))


@dataclass(frozen=True, kw_only=True)
class FallbackStep:
    """A step that xlite is not given although it runs in full mode, so that the model itself executes it.

    Attributes:
        num_tokens: Tokens of the step.
        foreign_metadata: The first metadata is another backend's; else there is no metadata.
    """

    name: str
    excess: str
    num_tokens: int
    foreign_metadata: bool

    def run(self, worker: NPUWorker, num_blocks: int) -> None:
        """Run the model on tokens without meaning."""
        del num_blocks
        worker.execute_fallback(self.num_tokens, foreign_metadata=self.foreign_metadata)


def audit_cases(config: RunnerConfig) -> list[AuditCase]:
    """What the configuration admits; the cheap and ordinary first, what may fail last."""
    steps = (_forward_steps, _sampling_steps, _fallback_steps, _draft_steps)
    return [case for make in steps for case in make(config)]


def sampling_variants(audit: AuditArgs) -> dict[str, SamplingParams]:
    """Sampling parameters by name: greedy, each admitted feature by itself, and all of them together."""
    values: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 1.0},
        "top_p": {"temperature": 1.0, "top_p": 0.9},
        "top_k": {"temperature": 1.0, "top_k": 50},
        "min_p": {"temperature": 1.0, "min_p": 0.1},
        "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        "logprobs": {"logprobs": MAX_LOGPROBS},
        "seed": {"temperature": 1.0, "seed": 0},
        "allowed_token_ids": {"allowed_token_ids": (0, 1)},
    }
    variants = {"greedy": GREEDY}
    everything: dict[str, Any] = {"temperature": 0.0}
    for feature in audit.sampling:
        if feature in values:
            variants[feature] = SamplingParams.model_validate({"temperature": 0.0, **values[feature]})
            everything |= values[feature]
    if len(variants) > 2:
        variants["everything"] = SamplingParams.model_validate(everything)
    return variants


@dataclass(frozen=True)
class _Limits:
    """The largest steps that the scheduler makes. Lengths in tokens."""

    config: RunnerConfig

    @property
    def longest(self) -> int:
        """Of a request; the scheduler computes no request's last position."""
        return self.config.scheduler.max_model_len - 1

    @property
    def chunk(self) -> int:
        """Of one request in one step."""
        return min(self.config.scheduler.max_num_batched_tokens, self.longest)

    def decodes(self, num_reqs: int, name: str, excess: str) -> Step:
        """A decode step of requests that are as long as they can be."""
        cached = max(self.longest - self.config.uniform_decode_query_len, 0)
        return Step(name=name, excess=excess, num_reqs=num_reqs, num_new_tokens=num_reqs, num_cached_tokens=cached)

    def prompt(self, name: str, excess: str) -> Step:
        """As much of one prompt as fits into a step, from its start."""
        return Step(name=name, excess=excess, num_reqs=1, num_new_tokens=self.chunk)


def _forward_steps(config: RunnerConfig) -> Iterator[Step]:
    """The largest forward passes, sampled greedily."""
    limits, excess = _Limits(config), "forward pass beyond the profile run"
    yield limits.decodes(1, "first step: one decode", excess)
    yield limits.prompt("one prompt from its start", excess)
    yield replace(
        limits.prompt("last chunk of the longest prompt", excess), num_cached_tokens=limits.longest - limits.chunk
    )
    if config.parallel.data_parallel_size > 1:
        decodes = limits.decodes(config.scheduler.max_num_seqs, "decodes on one data-parallel rank", excess)
        yield replace(decodes, idle_dp_ranks=True)


def _sampling_steps(config: RunnerConfig) -> Iterator[Step]:
    """As many requests as there can be, with every kind of sampling."""
    limits, num_reqs = _Limits(config), config.scheduler.max_num_seqs
    variants = sampling_variants(config.audit)
    for name, sampling_params in variants.items():
        decodes = limits.decodes(num_reqs, f"decodes, {name}", f"sampler beyond logits ({name})")
        yield replace(decodes, sampling_params=sampling_params)
    yield Step(
        name=f"most prompt tokens of most requests, {name}",
        excess=f"sampler beyond logits ({name})",
        num_reqs=num_reqs,
        num_new_tokens=min(config.scheduler.max_num_batched_tokens, num_reqs * limits.longest),
        sampling_params=sampling_params,
    )
    if "prompt_logprobs" in config.audit.sampling:
        prompt = limits.prompt("prompt logprobs of the largest prompt chunk", "prompt logprobs")
        yield replace(prompt, sampling_params=SamplingParams(temperature=0, prompt_logprobs=MAX_LOGPROBS))


def _fallback_steps(config: RunnerConfig) -> Iterator[FallbackStep]:
    """Few tokens, for which expert layers may communicate in another way, and as many as there can be."""
    xlite = config.ascend.xlite_graph_config
    if not (config.audit.fallback_paths and xlite.enabled and xlite.full_mode):
        return
    largest = config.scheduler.max_num_batched_tokens
    for num_tokens in sorted({min(mc2_tokens_capacity(config), largest), largest}):
        for foreign_metadata, kind in ((False, "no attention metadata"), (True, "another backend's metadata")):
            yield FallbackStep(
                name=f"{num_tokens} tokens, {kind}",
                excess="forward pass of the model itself",
                num_tokens=num_tokens,
                foreign_metadata=foreign_metadata,
            )


def _draft_steps(config: RunnerConfig) -> Iterator[Step]:
    """Decode steps that check draft tokens, of as many requests as there can be."""
    if config.speculative is None:
        return
    limits, num_drafts = _Limits(config), config.speculative.num_speculative_tokens
    num_reqs = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens // (1 + num_drafts))
    variants = sampling_variants(config.audit)
    for name in dict.fromkeys(("greedy", list(variants)[-1])):
        decodes = limits.decodes(num_reqs, f"decodes with drafts, {name}", f"rejection sampler beyond logits ({name})")
        cached = max(decodes.num_cached_tokens - 1, 0)  # the request's admission comes before
        yield replace(decodes, num_cached_tokens=cached, sampling_params=variants[name], num_draft_tokens=num_drafts)
