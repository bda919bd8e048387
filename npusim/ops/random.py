"""Random numbers: drawn from the device's generator when called, computed when read.

Each draw is a stream of NumPy's Philox bit generator with the device's (seed, offset) as key, so numbers do not depend
on which other draws were ever read. Grade: assumed (not the device's own Philox stream; the distributions are right).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from npusim.ops.operator import IN_BODY, operator
from npusim.ops.refusal import type_name
from npusim.torch_backend.generators import draw_key
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like

Floats = NDArray[np.float32]
_UNIT = np.float32(2**-24)


class _Stream:
    """The numbers of one draw."""

    def __init__(self, key: tuple[int, int]) -> None:
        self._bits = np.random.Philox(key=[part % (1 << 64) for part in key])

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.asarray(self._bits.random_raw(count))

    def uniform(self, count: int) -> Floats:
        """In [0, 1), multiples of 2**-24."""
        halves = self.words(-(-count // 2)).view(np.uint32)[:count]
        return (halves >> np.uint32(8)).astype(np.float32) * _UNIT

    def normal(self, count: int) -> Floats:
        """Mean 0, deviation 1 (Box and Muller)."""
        pairs = self.uniform(count + count % 2).reshape(2, -1)
        radius = np.sqrt(-2 * np.log1p(-pairs[0]))
        angle = np.float32(2 * np.pi) * pairs[1]
        return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]

    def exponential(self, count: int) -> Floats:
        """Rate 1; never 0."""
        return np.asarray(-np.log1p(-np.maximum(self.uniform(count), _UNIT / 2)), dtype=np.float32)


def draw(target: Tensor, generator: torch.Generator | None, numbers: Callable[[_Stream, int], NDArray[Any]]) -> None:
    """Fill ``target`` with what ``numbers`` makes of a new stream of ``generator``, or else of the device's own."""
    active = platform()
    default = active.runtimes[target.device.index].random
    key = default.advance() if generator is None else draw_key(generator)
    size, dtype = tuple(target.shape), target.dtype

    def compute() -> Tensor:
        count = int(np.prod(size, dtype=np.int64))
        return torch.from_numpy(np.ascontiguousarray(numbers(_Stream(key), count))).view(size).to(dtype)

    active.values.update((target,), (), compute)


@operator("aten::uniform_", computes=IN_BODY)
def uniform_(self: Tensor, low: float = 0.0, high: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    """Numbers in [low, high)."""
    draw(self, generator, lambda stream, count: stream.uniform(count) * np.float32(high - low) + np.float32(low))
    return self


@operator("aten::normal_", computes=IN_BODY)
def normal_(self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    """Numbers around ``mean``."""
    draw(self, generator, lambda stream, count: stream.normal(count) * np.float32(std) + np.float32(mean))
    return self


@operator("aten::exponential_", computes=IN_BODY)
def exponential_(self: Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    """Waiting times; a mask of the zeros among the uniform numbers is made in between."""
    if not self.is_floating_point():
        raise NotImplementedError(f"\"exponential_\" not implemented for '{type_name(self.dtype)}'")
    new_like(self, dtype=torch.bool)
    draw(self, generator, lambda stream, count: stream.exponential(count) / np.float32(lambd))
    return self


def _random_between(self: Tensor, low: int, high: int, generator: torch.Generator | None) -> Tensor:
    span = np.uint64(high - low)
    draw(self, generator, lambda stream, count: (stream.words(count) % span).astype(np.int64) + low)
    return self


@operator("aten::random_", computes=IN_BODY)
def random_(self: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Whole numbers over the range that the type represents exactly."""
    if self.dtype is torch.bool:
        return _random_between(self, 0, 2, generator)
    if self.is_floating_point():
        digits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}.get(self.dtype, 53)
        return _random_between(self, 0, (1 << digits) + 1, generator)
    return _random_between(self, 0, torch.iinfo(self.dtype).max, generator)


@operator("aten::random_.from", computes=IN_BODY)
def random_from(self: Tensor, low: int, high: int | None, *, generator: torch.Generator | None = None) -> Tensor:
    """Whole numbers in [low, high)."""
    return _random_between(self, low, torch.iinfo(torch.int64).max if high is None else high, generator)


@operator("aten::random_.to", computes=IN_BODY)
def random_to(self: Tensor, high: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Whole numbers in [0, high)."""
    return _random_between(self, 0, high, generator)


@operator("aten::bernoulli_.float", computes=IN_BODY)
def bernoulli_(self: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Ones with probability ``p``."""
    draw(self, generator, lambda stream, count: stream.uniform(count) < np.float32(p))
    return self


@operator("aten::multinomial", computes=IN_BODY)
def multinomial(
    self: Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Tensor:
    """Indices by weight, one kernel."""
    result = new_like(self, (*self.shape[:-1], num_samples) if self.dim() > 1 else (num_samples,), torch.int64)
    active = platform()
    default = active.runtimes[self.device.index].random
    key = default.advance() if generator is None else draw_key(generator)

    def compute(weights: Tensor) -> Tensor:
        stream = _Stream(key)
        if replacement:
            ends = weights.double().cumsum(-1)
            ends /= ends[..., -1:].clone()
            points = torch.from_numpy(stream.uniform(result_size.numel())).view(result_size).double()
            return torch.searchsorted(ends, points, right=True).clamp(max=weights.shape[-1] - 1)
        waits = torch.from_numpy(stream.exponential(weights.numel())).view(weights.shape)
        return (weights.float() / waits).topk(num_samples, -1).indices

    result_size = result.shape
    active.values.compute((result,), (self,), compute)
    return result


@operator("aten::randperm", computes=IN_BODY)
def randperm(
    n: int,
    *,
    dtype: torch.dtype | None = torch.int64,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """The numbers below ``n`` in random order."""
    result = torch.empty(n, dtype=dtype or torch.int64, device=device)
    draw(result, None, lambda stream, count: np.argsort(stream.words(count), kind="stable"))
    return result
