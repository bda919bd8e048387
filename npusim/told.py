"""Sampled tokens and chosen experts for a world of shapes, where nobody computes logits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

MEAN_LOGPROB = -1.0


class ToldTokens:
    """Answers reads of whole numbers with token ids, and of floating-point numbers with log probabilities.

    The n-th read on each device gives the same numbers, so that tensor-parallel ranks sample the same tokens. In a
    tensor of several columns, the columns after the first are token ids with probability ``acceptance_rate`` and else
    -1, as a rejection sampler returns drafts; after the first -1 all are -1.

    Args:
        vocab_size: Token ids are below it.
        seed: Of the numbers.
        acceptance_rate: Probability that a draft is accepted.
    """

    def __init__(self, vocab_size: int, seed: int = 0, acceptance_rate: float = 1.0) -> None:
        self._vocab_size = vocab_size
        self._acceptance_rate = acceptance_rate
        self._seed = seed
        self._num_draws: defaultdict[int, int] = defaultdict(int)
        self._generators: defaultdict[int, np.random.Generator] = defaultdict(lambda: np.random.default_rng(seed))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Numbers for a device tensor; None for one of truth values."""
        size = tuple(tensor.shape)
        if tensor.dtype.is_floating_point:
            numbers = self._generators[tensor.device.index].exponential(-MEAN_LOGPROB, size)
            return torch.from_numpy(numbers).neg().to(tensor.dtype)
        if tensor.dtype not in (torch.int32, torch.int64):
            return None
        return torch.from_numpy(self.tokens(tensor.device.index, size)).to(tensor.dtype)

    def tokens(self, device: int, size: tuple[int, ...]) -> NDArray[np.int64]:
        """What the next read of whole numbers on a device gives; counts as that read."""
        generator = self._generators[device]
        tokens = generator.integers(self._vocab_size, size=size)
        if len(size) > 1 and size[-1] > 1 and self._acceptance_rate < 1:
            is_accepted = generator.random((*size[:-1], size[-1] - 1)) < self._acceptance_rate
            tokens[..., 1:][~np.logical_and.accumulate(is_accepted, axis=-1)] = -1
        return tokens

    def choices(self, tensor: torch.Tensor, num_choices: int) -> Callable[[], torch.Tensor]:
        """Every choice is as probable as every other, in each row of its own. Grade: assumed."""
        self._num_draws[tensor.device.index] += 1
        seed = self._seed, self._num_draws[tensor.device.index]
        *rows, num_chosen = tensor.shape
        dtype = tensor.dtype

        def draw() -> torch.Tensor:
            keys = np.random.default_rng(seed).random((*rows, num_choices), dtype=np.float32)
            return torch.from_numpy(np.argpartition(keys, num_chosen - 1)[..., :num_chosen]).to(dtype)

        return draw
