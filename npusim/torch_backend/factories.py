"""Kernels that make, view, resize and copy tensors: the operators that every other one is built on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from npusim.torch_backend.host_memory import is_pinned
from npusim.torch_backend.registration import kernel, platform
from npusim.torch_backend.shells import CPU_KEYS
from npusim.torch_backend.storage import contiguous_stride, offset_of, span_bytes
from npusim.torch_backend.strides import preserved_stride
from npusim.torch_backend.tensors import is_simulated, new_like, new_on, runtime_of
from npusim.torch_backend.vendor_errors import vendor_error

_as_strided = torch.ops.aten.as_strided.default
_view = torch.ops.aten.view.default
_view_dtype = torch.ops.aten.view.dtype
_set = torch.ops.aten.set_.source_Storage_storage_offset


@kernel("aten", "empty.memory_format")
def empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """``torch.empty``.

    Raises:
        RuntimeError: A memory format that torch_npu does not make tensors in.
    """
    del layout, pin_memory
    if memory_format not in (None, torch.contiguous_format):
        raise vendor_error(
            RuntimeError,
            "Only c10::MemoryFormat::Contiguous is supported for creating a npu tensor",
            "ERR01007 OPS feature not supported",
        )
    return new_on(runtime_of(device), size, dtype or torch.get_default_dtype())


@kernel("aten", "empty_strided")
def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """``torch.empty_strided``."""
    del layout, pin_memory
    dtype = dtype or torch.get_default_dtype()
    size, stride = tuple(size), tuple(stride)
    num_bytes = span_bytes(size, stride, dtype.itemsize)
    return platform().storages.new_tensor(runtime_of(device), num_bytes, dtype, size, stride)


@kernel("aten", "as_strided")
def as_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """A view; every other view operator of torch ends here or in :func:`view`."""
    result: torch.Tensor = _as_strided.redispatch(CPU_KEYS, tensor, size, stride, storage_offset)
    return result


@kernel("aten", "view")
def view(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """``Tensor.view``."""
    result: torch.Tensor = _view.redispatch(CPU_KEYS, tensor, size)
    return result


@kernel("aten", "view.dtype")
def view_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``Tensor.view(dtype)``: the same bytes under another type."""
    result: torch.Tensor = _view_dtype.redispatch(CPU_KEYS, tensor, dtype)
    return result


@kernel("aten", "_reshape_alias")
def reshape_alias(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The view that ``reshape`` takes where no copy is needed."""
    return as_strided(tensor, size, stride, offset_of(tensor))


@kernel("aten", "set_.source_Storage_storage_offset")
def set_storage(
    tensor: torch.Tensor, source: Any, storage_offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    """Point a tensor at another storage."""
    storage = getattr(source, "_untyped_storage", source)
    stride = tuple(stride) or contiguous_stride(tuple(size))
    result: torch.Tensor = _set.redispatch(CPU_KEYS, tensor, storage, storage_offset, size, stride)
    return result


@kernel("aten", "set_.source_Storage")
def set_whole_storage(tensor: torch.Tensor, source: Any) -> torch.Tensor:
    """Point a tensor at the whole of another storage."""
    storage = getattr(source, "_untyped_storage", source)
    return set_storage(
        tensor, storage, 0, (platform().storages.of_storage(storage).num_bytes // tensor.element_size(),), (1,)
    )


@kernel("aten", "set_.source_Tensor")
def set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Make a tensor an alias of another."""
    return set_storage(tensor, source.untyped_storage(), offset_of(source), source.size(), source.stride())


@kernel("aten", "set_")
def set_nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Point a tensor at an empty storage, so that it holds no memory any more."""
    storage = platform().storages.allocate(runtime_of(tensor.device), 0)
    return set_storage(tensor, storage, 0, (0,), (1,))


@kernel("aten", "resize_")
def resize(tensor: torch.Tensor, size: Sequence[int], memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """``Tensor.resize_``: new memory only if the storage is too small; its bytes are kept."""
    del memory_format
    size = tuple(size)
    stride = contiguous_stride(size)
    active = platform()
    storages = active.storages
    needed_bytes = span_bytes(size, stride, tensor.element_size(), offset_of(tensor))
    storage = tensor.untyped_storage()
    record = storages.of(tensor)
    if record.num_bytes < needed_bytes:
        storage = storages.allocate(runtime_of(tensor.device), needed_bytes)
        storages.of_storage(storage).value = active.values.resized(record.value, record.num_bytes, needed_bytes)
    return set_storage(tensor, storage, offset_of(tensor), size, stride)


def _launch(tensor: torch.Tensor, name: str, num_bytes: int) -> None:
    """A kernel that writes to ``tensor`` was queued; it moves so many bytes."""
    runtime = platform().runtimes[tensor.device.index]
    card = runtime.card
    card.launch(name, runtime.current_stream(), card.costs.vector_ns(num_bytes))


@kernel("aten", "_copy_from")
def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``target.copy_(source)`` where at least one side is on a device."""
    staging = _staging(source, target, non_blocking=non_blocking)
    del staging
    values = platform().values
    if not is_simulated(target):
        copy_to_host(source, waits=not non_blocking)
        target.copy_(values.read(source))
    elif not is_simulated(source):
        _copy_to_device(source, target, waits=not (non_blocking and is_pinned(source)))
        values.write(target, source.expand(target.shape))
    elif source.numel():
        _launch(target, "aten::copy_", source.nbytes + target.nbytes)
        shape = target.shape  # not the target itself: a computation that nobody asks for must not keep its memory
        values.update((target,), (source,), lambda host: host.expand(shape))
    return target


def copy_to_host(source: torch.Tensor, *, waits: bool) -> None:
    """A copy to the host was queued; a blocking one waits for what was queued on the current stream before."""
    runtime = platform().runtimes[source.device.index]
    card = runtime.card
    card.copy(runtime.current_stream(), card.costs.device_to_host_ns(source.nbytes), waits=waits)


def _copy_to_device(source: torch.Tensor, target: torch.Tensor, *, waits: bool) -> None:
    """A copy from the host was queued; only one from pinned memory lets the host go on. Grade of that: assumed."""
    runtime = platform().runtimes[target.device.index]
    card = runtime.card
    card.copy(runtime.current_stream(), card.costs.host_to_device_ns(source.nbytes), waits=waits)


def _staging(source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool) -> torch.Tensor | None:
    """Memory on the device that a copy between host and device takes for itself (exact: golden records)."""
    if not is_simulated(target):
        return None if source.is_contiguous() else new_like(source)
    if is_simulated(source):
        return None
    if not target.is_contiguous():
        return new_like(target)
    return new_like(target, dtype=source.dtype) if non_blocking and source.dtype != target.dtype else None


@kernel("aten", "_copy_from_and_resize")
def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``_copy_from`` into a target that takes the source's size."""
    if target.shape != source.shape:
        target.resize_(source.shape)
    return copy_from(source, target)


@kernel("aten", "_local_scalar_dense")
def local_scalar_dense(tensor: torch.Tensor) -> bool | int | float | complex:
    """``Tensor.item``."""
    runtime_of(tensor.device).refuse_in_capture("Tensor.item")
    copy_to_host(tensor, waits=True)
    number: bool | int | float | complex = platform().values.read(tensor).item()
    return number


@kernel("aten", "fill_.Scalar")
def fill_scalar(tensor: torch.Tensor, value: complex) -> torch.Tensor:
    """``Tensor.fill_``; no memory."""
    _launch(tensor, "aten::fill_", tensor.nbytes)
    shape, dtype = tuple(tensor.shape), tensor.dtype
    platform().values.update((tensor,), (), lambda: torch.full(shape, value, dtype=dtype, device="cpu"))
    return tensor


@kernel("aten", "zero_")
def zero(tensor: torch.Tensor) -> torch.Tensor:
    """``Tensor.zero_``; no memory."""
    return fill_scalar(tensor, 0)


@kernel("aten", "clone")
def clone(tensor: torch.Tensor, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """``Tensor.clone``; contiguous unless the original's dense strides are to be preserved."""
    return _copy_of(tensor, tensor.dtype, tensor.device, memory_format)


@kernel("aten", "_to_copy")
def to_copy(
    tensor: torch.Tensor,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """``Tensor.to`` where it copies; the numbers are on the host at once, even where time has yet to pass until then.

    A cast to float64 on the device gives float32 (exact: golden records).
    """
    del layout, pin_memory
    if dtype is torch.float64 and (device or tensor.device).type == "npu" and is_simulated(tensor):
        dtype = torch.float32
    return _copy_of(tensor, dtype or tensor.dtype, device or tensor.device, memory_format, non_blocking=non_blocking)


def _copy_of(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    memory_format: torch.memory_format | None,
    *,
    non_blocking: bool = False,
) -> torch.Tensor:
    if memory_format in (None, torch.preserve_format) and not tensor.is_contiguous():
        stride = preserved_stride(tuple(tensor.shape), tensor.stride())
    else:
        stride = contiguous_stride(tuple(tensor.shape))
    if device.type != "npu":
        host = torch.empty_strided(tensor.size(), stride, dtype=dtype, device=device)
        return host.copy_(tensor, non_blocking=non_blocking)
    result = empty_strided(tensor.size(), stride, dtype, device=device)
    if not tensor.numel():
        return result
    if is_simulated(tensor):
        _launch(result, "aten::copy_", tensor.nbytes + result.nbytes)
        platform().values.compute((result,), (tensor,), lambda host: host)
    else:
        _copy_to_device(tensor, result, waits=not (non_blocking and is_pinned(tensor)))
        platform().values.write(result, tensor)
    return result


@kernel("aten", "record_stream")
def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """``Tensor.record_stream``: the memory is not reused before that stream is done."""
    active = platform()
    record = active.storages.of(tensor)
    if record.address:
        handle = active.runtimes[stream.device_index].streams.handle_of(stream.stream_id)
        record.device.tensor_memory.record_stream(record.address, handle)
