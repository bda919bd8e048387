"""The double of ``torch_npu.npu.memory``: the caching allocator's figures. All sizes in bytes."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_npu.npu.devices import Device, get_device_index, own_runtimes, runtime_of
from torch_npu.npu.streams import Stream

from npusim.errors import UnmodelledCallError, UnmodelledNameError
from npusim.memory.caching_allocator import CachingAllocator
from npusim.memory.pools import NO_POOL, PoolId
from npusim.memory.segment_snapshot import SegmentSnapshot
from npusim.memory.snapshot import Snapshot, dump_snapshot, take_snapshot
from npusim.torch_backend.pluggable import PluggableAllocator, from_library
from npusim.torch_backend.registration import platform
from npusim.torch_backend.vendor_errors import vendor_error


def _allocator(device: Device) -> CachingAllocator:
    index, runtimes = get_device_index(device), platform().runtimes
    if not 0 <= index < len(runtimes):
        raise vendor_error(
            RuntimeError, f"Invalid device argument {index}: did you call init?", "ERR00001 PTA invalid parameter"
        )
    allocator: CachingAllocator = runtimes[index].allocator
    return allocator


def memory_stats(device: Device = None) -> OrderedDict[str, int]:
    """All counters of the caching allocator, sorted by name."""
    return OrderedDict(_allocator(device).memory_stats())


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """The counters of :func:`memory_stats` as a tree, a level for each part of their names."""
    tree: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *path, leaf = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[leaf] = value
    return tree


def memory_allocated(device: Device = None) -> int:
    """Bytes in blocks that tensors hold."""
    return _allocator(device).memory_allocated


def max_memory_allocated(device: Device = None) -> int:
    """Peak of :func:`memory_allocated` since the start or the last reset."""
    return _allocator(device).max_memory_allocated


def memory_reserved(device: Device = None) -> int:
    """Bytes that the allocator holds from the device."""
    return _allocator(device).memory_reserved


def max_memory_reserved(device: Device = None) -> int:
    """Peak of :func:`memory_reserved` since the start or the last reset."""
    return _allocator(device).max_memory_reserved


def reset_peak_memory_stats(device: Device = None) -> None:
    """Start all peaks anew from the current figures."""
    _allocator(device).reset_peak_memory_stats()


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Start all totals and counters anew."""
    _allocator(device).reset_accumulated_memory_stats()


def _deprecated(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def reset_max_memory_allocated(device: Device = None) -> None:
    """Deprecated: :func:`reset_peak_memory_stats`."""
    _deprecated(
        "torch_npu.npu.reset_max_memory_allocated now calls torch_npu.npu.reset_peak_memory_stats, "
        "which resets /all/ peak memory stats."
    )
    reset_peak_memory_stats(device)


def reset_max_memory_cached(device: Device = None) -> None:
    """Deprecated: :func:`reset_peak_memory_stats`."""
    _deprecated(
        "torch_npu.npu.reset_max_memory_cached now calls torch_npu.npu.reset_peak_memory_stats, "
        "which resets /all/ peak memory stats."
    )
    reset_peak_memory_stats(device)


def memory_cached(device: Device = None) -> int:
    """Deprecated: :func:`memory_reserved`."""
    _deprecated("torch_npu.npu.memory_cached has been renamed to torch_npu.npu.memory_reserved")
    return memory_reserved(device)


def max_memory_cached(device: Device = None) -> int:
    """Deprecated: :func:`max_memory_reserved`."""
    _deprecated("torch_npu.npu.max_memory_cached has been renamed to torch_npu.npu.max_memory_reserved")
    return max_memory_reserved(device)


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """torch_npu's table of the counters."""
    return _allocator(device).memory_summary(abbreviated=abbreviated)


def memory_snapshot(mempool_id: PoolId | None = None) -> list[SegmentSnapshot]:
    """The segments of this process' devices, or those of one private pool, with their blocks."""
    allocators = [runtime.allocator for runtime in own_runtimes()]
    return take_snapshot(allocators, NO_POOL if mempool_id is None else mempool_id)["segments"]


def _snapshot(device: Device = None, augment_with_fx_traces: bool = False) -> Snapshot:
    """The segments of this process' devices and, if they were recorded, the events; as PyTorch's viewer reads them."""
    del device
    if augment_with_fx_traces:
        raise UnmodelledNameError("torch.npu.memory._snapshot(augment_with_fx_traces=True) is not modelled")
    return take_snapshot([runtime.allocator for runtime in own_runtimes()])


def _dump_snapshot(filename: str | Path = "dump_snapshot.pickle", augment_with_fx_traces: bool = False) -> None:
    """Write :func:`_snapshot` to a file."""
    dump_snapshot(_snapshot(augment_with_fx_traces=augment_with_fx_traces), filename)


def _record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    device: Device = None,
) -> None:
    """Record the allocator's events from now on, or stop; frames are Python's, whatever ``stacks`` says."""
    del stacks, device
    for runtime in own_runtimes():
        runtime.allocator.record_memory_history(enabled, context, max_entries)


def _set_allocator_settings(settings: str) -> None:
    """Change ``PYTORCH_NPU_ALLOC_CONF`` at run time."""
    for runtime in own_runtimes():
        runtime.allocator.set_allocator_settings(settings)


def get_allocator_backend() -> str:
    """The allocator's name."""
    return "native"


def empty_cache() -> None:
    """Give cached memory, operator workspaces included, back to the devices that this process uses."""
    for runtime in own_runtimes():
        runtime.allocator.empty_cache()


def empty_virt_addr_cache() -> None:
    """Unmap cached memory of expandable segments but keep the physical pages."""
    for runtime in own_runtimes():
        runtime.allocator.empty_virt_addr_cache()


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit what the allocator may hold to a fraction of the device."""
    _allocator(device).set_per_process_memory_fraction(fraction)


def get_per_process_memory_fraction(device: Device = None) -> float:
    """The limit set by :func:`set_per_process_memory_fraction`."""
    return _allocator(device).get_per_process_memory_fraction()


def caching_allocator_alloc(size: int, device: Device = None, stream: Stream | int | None = None) -> int:
    """Take a block from the caching allocator and return its address.

    Raises:
        TypeError: ``stream`` is neither a stream nor a handle.
    """
    runtime = runtime_of(device)
    handle = runtime.current_stream() if stream is None else stream.npu_stream if isinstance(stream, Stream) else stream
    if not isinstance(handle, int):
        raise vendor_error(
            TypeError,
            "Invalid type for stream argument, must be `torch_npu.npu.Stream` or `int` representing a pointer to a "
            "existing stream",
            "ERR00002 PTA invalid type",
        )
    address: int = runtime.allocator.malloc(size, handle)
    return address


def caching_allocator_delete(mem_ptr: int) -> None:
    """Give a block of :func:`caching_allocator_alloc` back to the current device.

    Raises:
        RuntimeError: There is no such block.
    """
    runtime_of(None).allocator.free(mem_ptr)


class NPUPluggableAllocator:
    """An allocator from a shared library, for a :class:`MemPool`; its functions are really called.

    Args:
        path_to_so_file: The library; None: the process itself.
        alloc_fn_name: ``void* f(ssize_t size, int device, aclrtStream stream)``.
        free_fn_name: ``void f(void* ptr, ssize_t size, int device, aclrtStream stream)``.

    Raises:
        OSError: There is no such library.
        AttributeError: It has no such function.
    """

    def __init__(self, path_to_so_file: str | None, alloc_fn_name: str, free_fn_name: str) -> None:
        exported = platform().sleep_mode.functions
        self._allocator = from_library(path_to_so_file, alloc_fn_name, free_fn_name, exported)

    def allocator(self) -> PluggableAllocator:
        """What :class:`MemPool` takes."""
        return self._allocator


def change_current_allocator(allocator: NPUPluggableAllocator) -> None:
    """Replace the caching allocator of the whole process, which is not modelled.

    Raises:
        RuntimeError: A device is in use already.
        UnmodelledCallError: None is.
    """
    del allocator
    if any(runtime.allocator.memory_stats()["num_device_alloc"] for runtime in own_runtimes()):
        raise RuntimeError("Can't swap an already initialized allocator")
    raise UnmodelledCallError("torch.npu.memory.change_current_allocator is not modelled on the simulated device")


class MemPool:
    """A private pool of the current device's allocator; its memory is given back when the object dies.

    Args:
        allocator: The ``_allocator`` of a :class:`NPUPluggableAllocator`, which makes the segments, unless they are
            expandable.
        use_on_oom: Whether others may use it before they run out of memory.
        no_split: Whether its segments serve one request each.

    Raises:
        TypeError: ``allocator`` is something else.
    """

    def __init__(
        self, allocator: PluggableAllocator | None = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        if allocator is not None and not isinstance(allocator, PluggableAllocator):
            raise TypeError(
                "__init__(): incompatible constructor arguments. MemPool takes the _allocator of a "
                f"NPUPluggableAllocator, got {type(allocator).__name__}"
            )
        runtime = runtime_of(None)
        self._allocator: CachingAllocator = runtime.allocator
        self._id: PoolId = runtime.new_pool_id(user=True)
        self._allocator.create_pool(self._id, allocator=allocator, use_on_oom=use_on_oom, no_split=no_split)
        weakref.finalize(self, _give_up, self._allocator, self._id).atexit = False

    @property
    def id(self) -> PoolId:
        """The pool's id."""
        return self._id

    def use_count(self) -> int:
        """How many hold the pool: this object, open scopes, graphs."""
        return self._allocator.pools.private[self._id].use_count

    def snapshot(self) -> list[SegmentSnapshot]:
        """The pool's segments."""
        return memory_snapshot(self._id)


def _give_up(allocator: CachingAllocator, pool_id: PoolId) -> None:
    allocator.release_pool(pool_id)
    allocator.empty_cache(pool_id)


@contextmanager
def use_mem_pool(pool: MemPool, device: Device = None) -> Iterator[None]:
    """Tensors of the calling rank come from ``pool`` inside a ``with`` block."""
    allocator = _allocator(device)
    allocator.begin_allocate_to_pool(pool.id)
    try:
        yield
    finally:
        allocator.end_allocate_to_pool(pool.id)
        allocator.release_pool(pool.id)


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"torch.npu.memory.{name} is not modelled on the simulated device")
