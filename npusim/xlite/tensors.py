"""Tensors of an xlite forward pass and the pool that they are taken from. Shapes and places only, no values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from npusim.xlite.arena import Arena, Block


class DType(Enum):
    """xlite's data types: the number it has in messages, and bits per element. Exact: GVirt xlite/csrc/base.h."""

    BIT1 = (0, 1)
    INT8 = (1, 8)
    INT32 = (2, 32)
    INT64 = (3, 64)
    FP16 = (4, 16)
    BF16 = (5, 16)
    FP32 = (6, 32)

    def __init__(self, code: int, bits: int) -> None:
        self.code = code
        self.bits = bits


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A shape with a place: a block of the pool, a view into one, or memory of the caller (no block)."""

    shape: tuple[int, ...]
    dtype: DType
    block: Block | None = None
    is_view: bool = False
    taker: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def view(self, *shape: int) -> Tensor:
        """Another shape on the same memory; the pool keeps the original."""
        return Tensor(shape, self.dtype, self.block, is_view=True, taker=self.taker)


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """One get or put of a pool, with the peak that stood after it."""

    kind: str
    tensor: Tensor
    peak_bytes: int


class TensorPool:
    """Takes tensors from an arena and gives them back.

    Args:
        arena: Where the bytes lie. Without a capacity the pool only counts, as the library's dummy pool does.
        bits_round_up: Whether a size in bits that is no whole number of bytes is rounded up (0.2.0) or down (0.1.0).
        events: List that every get and put is appended to; None records nothing.
    """

    def __init__(self, arena: Arena, *, bits_round_up: bool, events: list[PoolEvent] | None = None) -> None:
        self.arena = arena
        self.at_peak: tuple[Tensor, ...] = ()
        self._spare_bits = 7 if bits_round_up else 0
        self._events = events
        self._live: dict[Block, Tensor] = {}

    def num_bytes(self, shape: tuple[int, ...], dtype: DType) -> int:
        """Whole bytes of a tensor, before alignment."""
        return (math.prod(shape) * dtype.bits + self._spare_bits) // 8

    def get(self, shape: tuple[int, ...], dtype: DType, taker: str) -> Tensor:
        """Take a tensor; ``taker`` names the function of xlite that asks.

        Raises:
            RuntimeError: The arena is full, with xlite's text.
        """
        peak_before = self.arena.peak_bytes
        block = self.arena.get(self.num_bytes(shape, dtype))
        tensor = Tensor(shape, dtype, block, taker=taker)
        self._live[block] = tensor
        if self.arena.peak_bytes > peak_before:
            self.at_peak = tuple(self._live.values())
        self._record("get", tensor)
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Give back what :meth:`get` returned.

        Raises:
            ValueError: The tensor is a view, the caller's own, or was given back before.
        """
        if tensor.block is None or self._live.get(tensor.block) is not tensor:
            raise ValueError(f"{tensor} was not taken from this pool, or was put back before")
        del self._live[tensor.block]
        self.arena.put(tensor.block)
        self._record("put", tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Whether xlite takes the tensor as lying in the pool, so that XCCL peers can reach it without a copy.

        The real pool compares addresses. The counting pool has none to compare and knows only what it gave out itself,
        so that a view counts as foreign. Exact: GVirt xlite/csrc/base.cpp, tags 0.1.0rc11 and 0.2.0rc0.
        """
        if tensor.block is None:
            return False
        return not (tensor.is_view and self.arena.capacity_bytes is None)

    def _record(self, kind: str, tensor: Tensor) -> None:
        if self._events is not None:
            self._events.append(PoolEvent(kind, tensor, self.arena.peak_bytes))
