"""Allocators of the user's own, given as functions of a shared library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Final

AllocFunction = Callable[[int, int, int], "int | None"]
FreeFunction = Callable[[int, int, int, int], object]

_C_ALLOC: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_C_FREE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class PluggableAllocator:
    """A pair of functions that make and take back memory for a ``MemPool``; it is asked for whole segments.

    Args:
        alloc: Called with bytes, device and stream; returns an address, or 0 or None if there is no memory.
        free: Called with address, bytes, device and stream.
    """

    def __init__(self, alloc: AllocFunction, free: FreeFunction) -> None:
        self._alloc: Final = alloc
        self._free: Final = free

    def alloc(self, num_bytes: int, device: int, stream: int) -> int:
        """Address of ``num_bytes`` bytes, or 0."""
        return self._alloc(num_bytes, device, stream) or 0

    def free(self, address: int, num_bytes: int, device: int, stream: int) -> None:
        """Take memory back."""
        self._free(address, num_bytes, device, stream)


def from_library(path: str | None, alloc_name: str, free_name: str, exported: Mapping[str, Any]) -> PluggableAllocator:
    """The allocator made of two functions of a shared library, which are really called.

    What such a function does on the host happens. Device memory that it would take from the driver is not in the
    ledger, as no driver is there to ask.

    Args:
        path: The library; None: the process itself, where the doubles of compiled extensions export ``exported``.
        alloc_name: ``void* f(ssize_t size, int device, aclrtStream stream)``.
        free_name: ``void f(void* ptr, ssize_t size, int device, aclrtStream stream)``.
        exported: Functions of doubles by name.

    Raises:
        OSError: The library cannot be loaded.
        AttributeError: It has no function of that name.
    """
    if path is None and alloc_name in exported and free_name in exported:
        return PluggableAllocator(exported[alloc_name], exported[free_name])
    library = ctypes.CDLL(path)
    return PluggableAllocator(_C_ALLOC((alloc_name, library)), _C_FREE((free_name, library)))
