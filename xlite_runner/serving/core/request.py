"""A request on its way through the scheduler. Names and rules are vLLM's (``vllm/v1/request.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum, auto

from xlite_runner.serving.sampling_params import SamplingParams


class FinishReason(Enum):
    """Why a request ended, in the words of vLLM's API."""

    STOP = "stop"
    """EOS or one of its stop tokens came."""
    LENGTH = "length"
    """It has ``max_tokens`` output tokens, or ``max_model_len`` tokens in all."""
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(IntEnum):
    """Where a request is in its life; everything after ``PREEMPTED`` is an end."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()

    @property
    def is_finished(self) -> bool:
        """Whether it is one of the ends."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """The end in the API's words, None before it."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class Request:
    """One prompt and its answer.

    Args:
        request_id: Unique among unfinished requests.
        prompt_token_ids: At least one token.
        sampling_params: How tokens are chosen and when to stop.
        eos_token_id: The token that ends an answer, None if none does.
        arrival_time: When it came, in seconds of the engine's clock; decides between equal priorities.
        priority: Lower is served earlier, with scheduling policy ``priority``.
        cache_salt: Only requests with the same salt share cached blocks.

    Attributes:
        all_token_ids: Prompt and output.
        spec_token_ids: Draft tokens to be verified in the next step.
        stop_token_ids: Tokens that end it, EOS among them.
        min_num_tokens: Before it has so many tokens, prompt and output, nothing ends it.
        max_num_tokens: With so many it ends.
        num_computed_tokens: Tokens whose keys and values are in the cache once the steps scheduled so far have run.
        num_output_placeholders: Tokens that steps in flight will give, with asynchronous scheduling.
        is_prefill_chunk: Whether its last step ended in the middle of its tokens, so that nothing was sampled.
        stop_reason: The stop token that ended it.
        block_ids: Its block table. This and what follows is the KV-cache manager's.
        block_hashes: Of its leading full blocks, as far as they were asked for.
        num_cached_blocks: Leading blocks that the prefix cache knows.
        num_ready_tokens: Up to here tokens have slots, and no block gets full.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "async_tokens_to_discard",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "eos_token_id",
        "is_prefill_chunk",
        "max_num_tokens",
        "min_num_tokens",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_ready_tokens",
        "priority",
        "request_id",
        "sampling_params",
        "spec_token_ids",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        eos_token_id: int | None = None,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError("The decoder prompt cannot be empty")  # upstream's text
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.eos_token_id = None if sampling_params.ignore_eos else eos_token_id
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.num_prompt_tokens = len(prompt_token_ids)
        self.min_num_tokens = self.num_prompt_tokens + sampling_params.min_tokens
        self.max_num_tokens = self.num_prompt_tokens + sampling_params.max_tokens
        self.stop_token_ids = {*sampling_params.stop_token_ids, self.eos_token_id}
        self.all_token_ids = list(prompt_token_ids)
        self.spec_token_ids: Sequence[int] = ()
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.async_tokens_to_discard = 0
        self.num_preemptions = 0
        self.is_prefill_chunk = False
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        self.num_ready_tokens = 0

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output."""
        return self.all_token_ids[self.num_prompt_tokens :]

    def append_output_tokens(self, token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        """Add output tokens up to the one that ends the request, which then has its final status.

        The order of the rules is upstream's (``check_stop``): nothing below ``min_tokens``, EOS, stop tokens, length.

        Returns:
            The tokens that were added.
        """
        num_before = num_tokens = len(self.all_token_ids)
        for token_id in token_ids:
            self.all_token_ids.append(token_id)
            num_tokens += 1
            if num_tokens < self.min_num_tokens:
                continue
            if token_id in self.stop_token_ids:
                self.status = RequestStatus.FINISHED_STOPPED
                self.stop_reason = None if token_id == self.eos_token_id else token_id
                return token_ids[: num_tokens - num_before]
            if num_tokens >= self.max_num_tokens or num_tokens >= max_model_len:
                self.status = RequestStatus.FINISHED_LENGTH_CAPPED
                return token_ids[: num_tokens - num_before]
        return token_ids
