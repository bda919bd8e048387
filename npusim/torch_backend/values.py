"""The numbers behind simulated tensors.

A storage has :class:`Bytes` behind it or nothing. ``RealValues`` computes everything at once. ``ShapeValues`` computes
only what follows from data made on the host or by a generator, and only when somebody reads it: an operator with an
input that has no numbers gives outputs that have none. What is known of a storage may be a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from npusim.errors import UncomputedValueError
from npusim.torch_backend.byte_ranges import Ranges, covers, with_range, without_range
from npusim.torch_backend.storage import StorageTable, offset_of, span_bytes

Compute = Callable[..., Any]
"""Computes an operator on host tensors; returns its results in the order of the operator's new outputs."""


class Told(Protocol):
    """Says numbers that nobody computed."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a device tensor reads as, a host tensor of its shape; or None, which is an error."""

    def choices(self, tensor: torch.Tensor, num_choices: int) -> Callable[[], torch.Tensor]:
        """Computes a host tensor of this one's shape, whose rows are different whole numbers below ``num_choices``."""


class Bytes:
    """The bytes of one storage at one moment; changed after they were computed only while nobody can tell.

    Attributes:
        ranges: The bytes that have been computed or will be; None: all.
        is_awaited: Whether something that is computed later reads them as they are.
        layer: The range that a recipe wrote without a gap, and what it was written over; None if there is no such.
    """

    __slots__ = ("_depth", "_host", "_recipe", "is_awaited", "layer", "ranges")

    def __init__(
        self,
        host: torch.Tensor | None,
        recipe: Callable[[], torch.Tensor] | None = None,
        *,
        depth: int = 0,
        ranges: Ranges | None = None,
    ) -> None:
        self._host = host
        self._recipe = recipe
        self._depth = depth
        self.ranges = ranges
        self.is_awaited = False
        self.layer: tuple[int, int, Bytes | None] | None = None

    @property
    def depth(self) -> int:
        """How many recipes have to run one in the other to read; 0: it was computed."""
        return 0 if self._host is not None else self._depth

    def host(self) -> torch.Tensor:
        """The bytes, as a one-dimensional uint8 tensor on the host."""
        if self._host is None:
            assert self._recipe is not None
            self._host = self._recipe()
            self._recipe = self.layer = None
        return self._host

    def beneath(self, start: int, end: int) -> Bytes | None:
        """What is left to be known once everything from ``start`` up to ``end`` is overwritten.

        Recipes whose results are overwritten as a whole need not run, and chains of them do not grow.
        """
        value: Bytes | None = self
        while value is not None and value.layer is not None:
            first, last, below = value.layer
            if first < start or last > end:
                break
            value = below
        return value


class Values(Protocol):
    """How a world keeps the numbers behind its tensors."""

    @property
    def multiplies(self) -> bool:
        """Whether the results of matrix products are kept, too."""

    def known(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all these device tensors have numbers."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor of the same geometry with the numbers of a device tensor; not to be written to."""

    def write(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Put a host tensor's numbers into a device tensor of the same shape."""

    def compute(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], compute: Compute) -> None:
        """Let new ``outputs`` (each alone in its storage) have the results of ``compute(*host inputs)``."""

    def update(self, targets: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], compute: Compute) -> None:
        """Let existing ``targets`` be overwritten with the results of ``compute(*host inputs)``."""

    def forget(self, targets: Sequence[torch.Tensor]) -> None:
        """These were written by something that computes nothing."""

    def tell_choices(self, target: torch.Tensor, num_choices: int) -> None:
        """In case that nobody computes it: each row of ``target`` chooses among ``num_choices``."""

    def resized(self, value: Bytes | None, num_bytes: int, new_num_bytes: int) -> Bytes | None:
        """What is known of a storage of ``num_bytes`` bytes after it became one of ``new_num_bytes``."""


class Geometry(NamedTuple):
    """How a tensor sees its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of a tensor."""
        return cls(tensor.dtype, tuple(tensor.size()), tensor.stride(), offset_of(tensor))

    @property
    def is_empty(self) -> bool:
        """Whether it sees nothing at all."""
        return 0 in self.size

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the storage from the first to the last that it sees."""
        itemsize = self.dtype.itemsize
        return self.offset * itemsize, span_bytes(self.size, self.stride, itemsize, self.offset)

    def over(self, host: torch.Tensor) -> torch.Tensor:
        """The host tensor that sees these bytes as the device tensor sees its storage.

        Raises:
            RuntimeError: It sees more than there is (any more).
        """
        if self.span[1] > host.numel():
            where = f"sizes {list(self.size)}, strides {list(self.stride)}, storage offset {self.offset}"
            needs = f"itemsize {self.dtype.itemsize} requiring a storage size of {self.span[1]}"
            raise RuntimeError(f"setStorage: {where}, and {needs} are out of bounds for storage of size {host.numel()}")
        view = torch.empty(0, dtype=self.dtype, device="cpu")
        return view.set_(host.untyped_storage(), self.offset, self.size, self.stride)

    def empty(self) -> torch.Tensor:
        """A host tensor of this size without elements to see."""
        return torch.empty(self.size, dtype=self.dtype, device="cpu")


def _results(value: Any) -> Sequence[torch.Tensor]:
    return (value,) if isinstance(value, torch.Tensor) else value


def _overwritten(
    old: Bytes | None, num_bytes: int, geometry: Geometry, result: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """A storage's bytes after ``result`` was written through ``geometry``."""
    host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu") if old is None else old.host().clone()
    geometry.over(host).copy_(result())
    return host


def _overwritten_in_place(
    old: Bytes, geometry: Geometry, result: Callable[[], torch.Tensor], ranges: Ranges | None
) -> Bytes:
    """The same where nobody else needs the old bytes, which may be many more than are written."""
    host, written = old.host(), result()
    if written.untyped_storage()._cdata == host.untyped_storage()._cdata:
        written = written.clone()
    geometry.over(host).copy_(written)
    return Bytes(host, ranges=ranges)


class _Computation:
    """One operator on the bytes that its inputs hold now; runs once, when first asked."""

    def __init__(self, storages: StorageTable, inputs: Sequence[torch.Tensor], compute: Compute) -> None:
        self._inputs = [(storages.of(t).value if t.numel() else None, Geometry.of(t)) for t in inputs]
        self._compute = compute
        self._results: Sequence[torch.Tensor] | None = None
        self.depth = max((value.depth for value, _ in self._inputs if value is not None), default=0)

    def result(self, position: int) -> torch.Tensor:
        """The host tensor that the operator returns at ``position``."""
        if self._results is None:
            hosts = [
                geometry.empty() if value is None else geometry.over(value.host()) for value, geometry in self._inputs
            ]
            self._results = _results(self._compute(*hosts))
            self._inputs.clear()
        return self._results[position]

    def is_postponed(self) -> None:
        """It will read what its inputs hold now, whatever is written to them meanwhile."""
        for value, _ in self._inputs:
            if value is not None:
                value.is_awaited = True


class _Values:
    """What both kinds share: writing from the host."""

    def __init__(self, storages: StorageTable) -> None:
        self._storages = storages

    def write(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """See :class:`Values`."""
        frozen = source.detach().clone()
        self.update((tensor,), (), lambda: frozen)

    def update(self, targets: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], compute: Compute) -> None:
        """See :class:`Values`."""
        raise NotImplementedError


def _prefix(value: Bytes, num_bytes: int) -> torch.Tensor:
    """The first bytes, with zeros after the last one that there is."""
    host = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    old = value.host()[:num_bytes]
    host[: len(old)] = old
    return host


class RealValues(_Values):
    """Every storage has bytes, computed at once; uninitialised memory reads as zeros. For tiny models."""

    multiplies = True

    def _bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        record = self._storages.of(tensor)
        if record.value is None:
            record.value = Bytes(torch.zeros(record.num_bytes, dtype=torch.uint8, device="cpu"))
        return record.value.host()

    def known(self, tensors: Sequence[torch.Tensor]) -> bool:  # noqa: ARG002
        """All are."""
        return True

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`Values`; uninitialised memory is zeros."""
        geometry = Geometry.of(tensor)
        return geometry.empty() if geometry.is_empty else geometry.over(self._bytes(tensor))

    def compute(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], compute: Compute) -> None:
        """See :class:`Values`."""
        self.update(outputs, inputs, compute)

    def update(self, targets: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], compute: Compute) -> None:
        """See :class:`Values`."""
        results = _results(compute(*[self.read(tensor) for tensor in inputs]))
        for target, result in zip(targets, results, strict=True):
            if target.numel():
                host = self._bytes(target)
                if result.untyped_storage()._cdata == host.untyped_storage()._cdata:
                    result = result.clone()
                Geometry.of(target).over(host).copy_(result)

    def forget(self, targets: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        """Nothing is forgotten: the old numbers stay."""
        return

    def tell_choices(self, target: torch.Tensor, num_choices: int) -> None:  # noqa: ARG002
        """Everything is computed."""
        return

    def resized(self, value: Bytes | None, num_bytes: int, new_num_bytes: int) -> Bytes | None:  # noqa: ARG002
        """See :class:`Values`; zeros follow."""
        return None if value is None else Bytes(_prefix(value, new_num_bytes))


class ShapeValues(_Values):
    """Numbers only where they follow from host data, and computed only when read.

    Random fills count as host data, so that random routing can be read; but dummy weights are random fills, too, and
    nothing is to be followed through a model: matrix products have no numbers.

    Args:
        storages: The world's storages.
        told: Asked when a value is read that nobody computed. What it says is then the tensor's value.
        eager_limit_bytes: Storages up to this size are computed at once if what they follow from is.
        max_depth: How long a chain of recipes may become; then it is computed, read or not.
        max_chained_bytes: Storages above this size are not computed for that, and become unknown instead.
    """

    multiplies = False

    def __init__(
        self,
        storages: StorageTable,
        *,
        told: Told | None = None,
        eager_limit_bytes: int = 1 << 16,
        max_depth: int = 32,
        max_chained_bytes: int = 1 << 24,
    ) -> None:
        super().__init__(storages)
        self._told = told
        self._eager_limit_bytes = eager_limit_bytes
        self._max_depth = max_depth
        self._max_chained_bytes = max_chained_bytes

    def known(self, tensors: Sequence[torch.Tensor]) -> bool:
        """See :class:`Values`."""
        of = self._storages.of
        for tensor in tensors:
            if tensor.numel():
                value = of(tensor).value
                if value is None or (value.ranges is not None and not covers(value.ranges, *Geometry.of(tensor).span)):
                    return False
        return True

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`Values`.

        Raises:
            UncomputedValueError: They are not known.
        """
        geometry = Geometry.of(tensor)
        if geometry.is_empty:
            return geometry.empty()
        if not self.known([tensor]) and not self._is_told(tensor):
            raise UncomputedValueError(
                f"a value of a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device} was read, but "
                "nobody computed it: it comes from dummy weights, uninitialised memory or an operator modelled by "
                "its shapes only; run the world in real mode, or read something that follows from host data"
            )
        value = self._storages.of(tensor).value
        assert value is not None
        return geometry.over(value.host())

    def _is_told(self, tensor: torch.Tensor) -> bool:
        answer = None if self._told is None else self._told(tensor)
        if answer is None:
            return False
        self.write(tensor, answer)
        return self.known([tensor])

    def compute(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], compute: Compute) -> None:
        """See :class:`Values`; the outputs of unknown inputs are unknown."""
        if self.known(inputs):
            self._write(outputs, _Computation(self._storages, inputs, compute))

    def update(self, targets: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], compute: Compute) -> None:
        """See :class:`Values`; unknown inputs make the targets unknown."""
        if self.known(inputs):
            self._write(targets, _Computation(self._storages, inputs, compute))
        else:
            self.forget(targets)

    def forget(self, targets: Sequence[torch.Tensor]) -> None:
        """See :class:`Values`."""
        for target in targets:
            if not target.numel():
                continue
            record = self._storages.of(target)
            value = record.value
            if value is not None:
                known = value.ranges or ((0, record.num_bytes),)
                left = without_range(known, *Geometry.of(target).span)
                if not left:
                    record.value = None
                elif left != known:
                    value.is_awaited = True
                    record.value = self._lazy(value.host, record.num_bytes, value.depth, left)

    def tell_choices(self, target: torch.Tensor, num_choices: int) -> None:
        """See :class:`Values`; drawn only when read."""
        if self._told is not None:
            self.update((target,), (), self._told.choices(target, num_choices))

    def resized(self, value: Bytes | None, num_bytes: int, new_num_bytes: int) -> Bytes | None:
        """See :class:`Values`; what follows a storage that is known is zeros."""
        if value is None:
            return None
        value.is_awaited = True
        ranges = value.ranges
        if ranges is not None and new_num_bytes < num_bytes:
            ranges = without_range(ranges, new_num_bytes, num_bytes)
        return self._lazy(partial(_prefix, value, new_num_bytes), new_num_bytes, value.depth, ranges)

    def _write(self, targets: Sequence[torch.Tensor], computation: _Computation) -> None:
        for position, target in enumerate(targets):
            if target.numel():
                self._write_one(target, computation, position)

    def _write_one(self, target: torch.Tensor, computation: _Computation, position: int) -> None:
        record, geometry = self._storages.of(target), Geometry.of(target)
        num_bytes, has_no_gap = record.num_bytes, target.is_contiguous()
        if target.numel() * geometry.dtype.itemsize == num_bytes:
            old, ranges = None, None
        else:
            old = record.value
            ranges = () if old is None else old.ranges
            if ranges is not None and has_no_gap:
                ranges = with_range(ranges, *geometry.span)
            if old is not None and has_no_gap:
                old = old.beneath(*geometry.span)
            if ranges == ():
                return  # between bytes that nobody knows
            if ranges == ((0, num_bytes),):
                ranges = None
        result = partial(computation.result, position)
        depth = computation.depth if old is None else max(computation.depth, old.depth)
        if old is not None and depth == 0 and not old.is_awaited and self._is_small(target):
            record.value = _overwritten_in_place(old, geometry, result, ranges)
            return
        value = self._lazy(partial(_overwritten, old, num_bytes, geometry, result), num_bytes, depth, ranges)
        if value is not None and value.depth:
            computation.is_postponed()
            if old is not None:
                old.is_awaited = True
            if has_no_gap:
                value.layer = (*geometry.span, old)
        record.value = value

    def _is_small(self, target: torch.Tensor) -> bool:
        return target.numel() * target.itemsize <= self._eager_limit_bytes

    def _lazy(
        self, recipe: Callable[[], torch.Tensor], num_bytes: int, depth: int, ranges: Ranges | None
    ) -> Bytes | None:
        """Bytes by a recipe that reads through ``depth`` others; small ones, and ends of chains, are computed now."""
        if (depth == 0 and num_bytes <= self._eager_limit_bytes) or depth >= self._max_depth:
            return Bytes(recipe(), ranges=ranges) if num_bytes <= self._max_chained_bytes else None
        return Bytes(None, recipe, depth=depth + 1, ranges=ranges)
