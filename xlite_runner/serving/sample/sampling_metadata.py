"""How the rows of a batch are to be sampled, as the sampler needs it: one object as long as the batch is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of all rows, each [rows] float32, and what they are counted on.

    Attributes:
        prompt_token_ids: [rows, longest prompt] int64, padded with the vocabulary's size.
        output_token_ids: By row, on the host; they grow with every step.
    """

    prompt_token_ids: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    output_token_ids: Sequence[Sequence[int]]


@dataclass(slots=True, kw_only=True)
class MinTokens:
    """Rows that may not end yet.

    Attributes:
        stop_token_ids: Tokens that would end a row, by row.
        min_tokens: Output tokens before which they are forbidden, by row.
        output_token_ids: Output so far, by row.
        forbidden: Rows and tokens on the device, each [places] int32, as of the last :meth:`refresh`; None if there
            are none. They stay there between steps.
    """

    stop_token_ids: Mapping[int, Sequence[int]]
    min_tokens: Mapping[int, int]
    output_token_ids: Sequence[Sequence[int]]
    forbidden: tuple[torch.Tensor, ...] | None = None
    _places: tuple[list[int], list[int]] = field(default=([], []), init=False)

    def refresh(self, device: torch.device) -> None:
        """Bring what is forbidden now to the device, if that has changed."""
        places = self.places()
        if places != self._places:
            self._places = places
            self.forbidden = uploaded_places(*places, device) if places[0] else None

    def places(self) -> tuple[list[int], list[int]]:
        """Rows and tokens that are forbidden now."""
        rows: list[int] = []
        tokens: list[int] = []
        for row, token_ids in self.stop_token_ids.items():
            if len(self.output_token_ids[row]) < self.min_tokens[row]:
                rows.extend([row] * len(token_ids))
                tokens.extend(token_ids)
        return rows, tokens


def uploaded_places(rows: Sequence[int], tokens: Sequence[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Places in logits as indices on the device, each [places] int32."""
    return tuple(
        torch.tensor(values, dtype=torch.int32, device="cpu", pin_memory=True).to(device, non_blocking=True)
        for values in (rows, tokens)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """Sampling parameters of the batch; tensors have one element per row and are None where no row asks for them.

    Attributes:
        all_greedy: Every row takes its most probable token.
        all_random: No row does.
        temperature: float32; 0 for greedy rows.
        top_p: float32; 1 keeps all.
        top_k: int32; the vocabulary's size keeps all.
        min_p: float32, [rows, 1].
        generators: By row, of rows that have a seed.
        max_num_logprobs: The most log probabilities that a row asks for; None if none does.
        penalties: None if no row has any.
        allowed_token_ids_mask: bool, [rows, vocabulary], true where a token may *not* be chosen.
        min_tokens: None if no row has a minimum.
    """

    all_greedy: bool
    all_random: bool
    temperature: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    generators: Mapping[int, torch.Generator] = field(default_factory=dict)
    max_num_logprobs: int | None = None
    penalties: Penalties | None = None
    allowed_token_ids_mask: torch.Tensor | None = None
    min_tokens: MinTokens | None = None
