"""What a scheduler counts, under the names of vLLM's metrics without their prefix ``vllm:``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from xlite_runner.serving.core.request import FinishReason


@dataclass(slots=True)
class ServingCounters:
    """Counts since the scheduler was made.

    Attributes:
        prefix_cache_queries: Tokens looked up in the prefix cache. A request that waits for blocks is looked up in each
            step anew, one that was preempted does not count; both as upstream.
        prefix_cache_hits: Those of them that were found.
        num_preemptions: Times that a request lost its blocks.
        prompt_tokens: Tokens of prompts whose first output token came.
        generation_tokens: Output tokens.
        request_success: Finished requests by reason.
        spec_decode_num_drafts: Verifications of draft tokens.
        spec_decode_num_draft_tokens: Draft tokens verified.
        spec_decode_num_accepted_tokens: Draft tokens accepted.
        spec_decode_num_accepted_tokens_per_pos: The same by position, the first draft token of a step at position 0.
    """

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    request_success: Counter[FinishReason] = field(default_factory=Counter)
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State after one step.

    Attributes:
        kv_cache_usage_perc: Fraction of the blocks in use, 0 to 1.
        counters: Live, not a copy: it goes on counting.
    """

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float
    counters: ServingCounters
