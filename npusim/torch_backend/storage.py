"""Storages on the simulated device: their birth is a malloc of the caching allocator, their end its free."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from npusim.errors import WorldError
from npusim.torch_backend.registration import shells

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.torch_backend.runtime import DeviceRuntime
    from npusim.torch_backend.values import Bytes

ND = 2
"""torch_npu's number for memory in plain order."""
_construct: Any = torch._C._construct_storage_from_data_pointer


class StorageRecord(weakref.ref[torch.UntypedStorage]):
    """What lies behind one storage: device, address, size and, if known, its bytes.

    It is itself the weak reference to the C++ storage, so that it learns of the storage's death at the moment when the
    last tensor over it goes.
    """

    __slots__ = ("address", "device", "key", "npu_format", "num_bytes", "value")

    key: int
    device: DeviceRuntime
    address: int
    num_bytes: int
    npu_format: int
    value: Bytes | None

    def resize(self, num_bytes: int) -> None:
        """Take other memory from the allocator, then give the old one back; the bytes are unknown then.

        torch's C++ side goes on to name the first address.
        """
        old_address = self.address
        self.address = self.device.tensor_memory.malloc(num_bytes, self.device.current_stream()) if num_bytes else 0
        self.num_bytes = num_bytes
        self.value = None
        if old_address:
            self.device.tensor_memory.free(old_address)


class _Alias(weakref.ref[torch.UntypedStorage]):
    """A further storage over the memory of another one, which it does not keep."""

    __slots__ = ("key",)

    key: int


class StorageTable:
    """All live storages on simulated devices, by the identity of their C++ object."""

    def __init__(self) -> None:
        self._records: dict[int, StorageRecord] = {}
        self._aliases: dict[int, _Alias] = {}
        self._shells = shells()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StorageRecord]:
        yield from self._records.values()

    def allocate(self, device: DeviceRuntime, num_bytes: int) -> torch.UntypedStorage:
        """A storage of ``num_bytes`` bytes on ``device``, allocated on its current stream."""
        address = device.tensor_memory.malloc(num_bytes, device.current_stream())
        storage: torch.UntypedStorage = _construct(address, device.torch_device, num_bytes)
        self._record(storage, device, address, num_bytes)
        return storage

    def new_tensor(
        self, device: DeviceRuntime, num_bytes: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """A plain ``torch.Tensor`` over a new storage of ``num_bytes`` bytes, which must be what its geometry spans."""
        address = device.tensor_memory.malloc(num_bytes, device.current_stream())
        tensor = self._shells.over_memory(device.card.index, address, num_bytes, dtype, size, stride)
        self._record(tensor.untyped_storage(), device, address, num_bytes)
        return tensor

    def _record(self, storage: torch.UntypedStorage, device: DeviceRuntime, address: int, num_bytes: int) -> None:
        record = StorageRecord(storage, self._on_death)
        key = storage._cdata
        record.key, record.device, record.address, record.num_bytes = key, device, address, num_bytes
        record.npu_format = ND
        record.value = None
        self._records[key] = record

    def tensor(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int = 0,
    ) -> torch.Tensor:
        """A plain ``torch.Tensor`` over a storage."""
        return self._shells.over_storage(storage, dtype, size, stride, offset)

    def of(self, tensor: torch.Tensor) -> StorageRecord:
        """The record behind a tensor on a simulated device."""
        return self.of_storage(tensor.untyped_storage())

    def of_storage(self, storage: torch.UntypedStorage) -> StorageRecord:
        """The record of a storage.

        Raises:
            WorldError: The storage was not made by a device of this world.
        """
        try:
            return self._records[storage._cdata]
        except KeyError:
            raise WorldError(
                f"a storage on {storage.device} was not allocated by a device of the active world; tensors of another "
                "world cannot be used, only dropped"
            ) from None

    def find(self, storage: torch.UntypedStorage) -> StorageRecord | None:
        """The record of a storage, if this table has one."""
        return self._records.get(storage._cdata)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that does not keep it; its bytes are those of the original's storage."""
        record = self.of(tensor)
        memory = self._shells.over_memory(
            record.device.card.index, record.address, record.num_bytes, torch.uint8, (record.num_bytes,), (1,)
        )
        storage = memory.untyped_storage()
        alias = _Alias(storage, self._on_alias_death)
        alias.key = storage._cdata
        self._aliases[alias.key] = alias
        self._records[alias.key] = record
        return self.tensor(storage, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def _on_alias_death(self, alias: weakref.ref[Any]) -> None:
        assert isinstance(alias, _Alias)
        del self._aliases[alias.key], self._records[alias.key]

    def _on_death(self, record: weakref.ref[Any]) -> None:
        assert isinstance(record, StorageRecord)
        del self._records[record.key]
        if record.address:
            record.device.tensor_memory.free(record.address)


def offset_of(tensor: torch.Tensor) -> int:
    """Place of a tensor's first element in its storage, in elements."""
    offset = tensor.storage_offset()
    assert isinstance(offset, int)
    return offset


def contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this size, in elements."""
    num_dims = len(size)
    if num_dims == 2:  # worth a line of its own: nearly every activation
        return (size[1] or 1, 1)
    stride = [1] * num_dims
    for dim in range(num_dims - 2, -1, -1):
        stride[dim] = stride[dim + 1] * (size[dim + 1] or 1)
    return tuple(stride)


def span_bytes(size: tuple[int, ...], stride: tuple[int, ...], itemsize: int, offset: int = 0) -> int:
    """Bytes of storage that a tensor of this geometry needs."""
    last = offset
    for extent, step in zip(size, stride, strict=True):
        if extent == 0:
            return 0
        last += (extent - 1) * step
    return (last + 1) * itemsize
