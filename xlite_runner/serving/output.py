"""What the scheduler tells the model runner, and what comes back. Names are vLLM's (``vllm/v1/core/sched/output.py``).

Plain values only, so that one scheduler can speak to ranks in other threads or processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xlite_runner.serving.core.request import FinishReason
from xlite_runner.serving.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request that the workers have not seen yet.

    Attributes:
        block_ids: Its blocks in the order of its tokens.
        num_computed_tokens: Leading tokens whose keys and values the cache already holds.
    """

    req_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    block_ids: Sequence[int]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRequestData:
    """Requests that the workers know; all sequences are parallel to ``req_ids``.

    Attributes:
        resumed_req_ids: Those that were preempted: ``new_block_ids`` is then their whole block table.
        new_block_ids: Blocks to append; None if there are none.
        all_token_ids: Prompt and output of those that were not scheduled in the step before.
        num_computed_tokens: Leading tokens whose keys and values the cache already holds.
        num_output_tokens: Output tokens so far.
    """

    req_ids: Sequence[str] = ()
    resumed_req_ids: frozenset[str] = frozenset()
    new_block_ids: Sequence[Sequence[int] | None] = ()
    all_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    num_computed_tokens: Sequence[int] = ()
    num_output_tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step.

    Attributes:
        num_scheduled_tokens: New tokens by request, in the order in which the requests were scheduled.
        scheduled_spec_decode_tokens: Draft tokens by request, of those that have any.
        preempted_req_ids: Requests whose blocks were taken away for this step.
        finished_req_ids: Requests that ended since the step before.
        num_common_prefix_blocks: Leading blocks that all running requests share.
    """

    scheduled_new_reqs: Sequence[NewRequestData] = ()
    scheduled_cached_reqs: CachedRequestData = CachedRequestData()
    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    preempted_req_ids: frozenset[str] = frozenset()
    finished_req_ids: frozenset[str] = frozenset()
    num_common_prefix_blocks: int = 0

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step, without padding."""
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsLists:
    """Log probabilities of one request's new tokens, a row for each.

    Attributes:
        token_ids: Most probable tokens of a position, the chosen one first.
        logprobs: Their log probabilities.
        sampled_token_ranks: Rank of the chosen token, 1 is the most probable.
    """

    token_ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    sampled_token_ranks: Sequence[int]

    def first(self, num_tokens: int) -> LogprobsLists:
        """Those of the first tokens."""
        if num_tokens >= len(self.token_ids):
            return self
        return LogprobsLists(
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            sampled_token_ranks=self.sampled_token_ranks[:num_tokens],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """What one step gave; everything is by request.

    Attributes:
        sampled_token_ids: New tokens; none for a request in the middle of its prompt.
        draft_token_ids: Proposals for the next step, with speculation.
        logprobs: Of the new tokens, for requests that asked.
        prompt_logprobs: Of the prompt's tokens computed in this step, for requests that asked.
    """

    sampled_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    draft_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    logprobs: Mapping[str, LogprobsLists] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, LogprobsLists] = field(default_factory=dict)


@dataclass(slots=True)
class EngineCoreOutput:
    """What a step brought to one request; not frozen, since that would cost a decode step more than the rest of it.

    Attributes:
        finish_reason: Why it ended, None if it goes on.
        stop_reason: The stop token that ended it.
    """

    request_id: str
    new_token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: LogprobsLists | None = None
    prompt_logprobs: LogprobsLists | None = None

    @property
    def finished(self) -> bool:
        """Whether the request ended."""
        return self.finish_reason is not None
