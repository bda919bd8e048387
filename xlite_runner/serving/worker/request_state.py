"""What a worker remembers of a request from its first step to its last, scheduled or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from xlite_runner.serving.output import NewRequestData
from xlite_runner.serving.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True, eq=False)
class CachedRequestState:
    """One request.

    Attributes:
        block_ids: Its blocks, in the order of its tokens.
        num_computed_tokens: Leading tokens whose keys and values the cache holds before the step.
        output_token_ids: What was sampled so far; drafts that were accepted count.
        generator: Of its own, if it has a seed.
        draft_token_ids: What was proposed for the next step.
        verification: Number of the last step that verified drafts, and how many of them it rejected.
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    generator: torch.Generator | None = None
    draft_token_ids: Sequence[int] = ()
    verification: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, data: NewRequestData, device: torch.device) -> CachedRequestState:
        """The state of a request that the scheduler announces."""
        seed = data.sampling_params.seed
        generator = None
        if seed not in (None, -1) and not data.sampling_params.is_greedy:
            generator = torch.Generator(device=device)
            generator.manual_seed(seed)
        return cls(
            req_id=data.req_id,
            prompt_token_ids=tuple(data.prompt_token_ids),
            sampling_params=data.sampling_params,
            block_ids=list(data.block_ids),
            num_computed_tokens=data.num_computed_tokens,
            generator=generator,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output, without drafts."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)
