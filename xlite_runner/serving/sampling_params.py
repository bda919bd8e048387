"""How the next token of a request is chosen. Names, defaults and limits are vLLM's ``SamplingParams``."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

_Penalty = Annotated[float, Field(ge=-2, le=2)]
_FLOAT32_MAX = 3.4028234663852886e38

SAMPLING_EPS = 1e-5
"""Below this temperature vLLM's sampler takes the most probable token."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this one to it."""


class SamplingParams(BaseModel):
    """One request's sampling parameters.

    Attributes:
        temperature: 0 is greedy; above 0 it counts as at least 0.01.
        top_p: Share of probability that is kept; 1 keeps all.
        top_k: Number of tokens that are kept; 0 and -1 keep all.
        min_p: Least probability that is kept, relative to the most probable token's.
        logprobs: Log probabilities to report for each output token; -1 is the whole vocabulary, None none.
        prompt_logprobs: The same for each token of the prompt.
        seed: Of a generator of the request's own; None and -1 use the device's.
        max_tokens: Most output tokens.
        min_tokens: Output tokens before which neither EOS nor a stop token ends the request.
        ignore_eos: EOS does not end the request.
        stop_token_ids: Tokens that end the request.
        allowed_token_ids: The only tokens that may be chosen; None allows all.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0, le=_FLOAT32_MAX)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=_FLOAT32_MAX)] = 1.0
    logprobs: Annotated[int, Field(ge=-1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: PositiveInt = 16
    min_tokens: NonNegativeInt = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken; the filters then have no effect."""
        return self.temperature == 0

    @property
    def effective_temperature(self) -> float:
        """What the sampler divides logits by; 0 is greedy."""
        return 0.0 if self.is_greedy else max(self.temperature, LEAST_TEMPERATURE)

    def verify(self, vocab_size: int) -> None:
        """Check what only a model can tell.

        Raises:
            ValueError: Tokens outside of its vocabulary, none to choose from, or more log probabilities than there are
                tokens; the first two in upstream's text.
        """
        allowed = self.allowed_token_ids
        if allowed is not None and not allowed:
            raise ValueError("allowed_token_ids is not None and empty!")
        if allowed is not None and not all(0 <= token_id < vocab_size for token_id in allowed):
            raise ValueError("allowed_token_ids contains out-of-vocab token id!")
        for name, number in (("sample", self.logprobs), ("prompt", self.prompt_logprobs)):
            if number is not None and number > vocab_size:
                raise ValueError(
                    f"Requested {name} logprobs of {number}, which is greater than max allowed: {vocab_size}"
                )

    @model_validator(mode="after")
    def _check_min_tokens(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens}: allowed is at most max_tokens = {self.max_tokens}")
        return self
