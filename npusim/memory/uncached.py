"""Tensor memory under ``PYTORCH_NO_NPU_MEMORY_CACHING``: a call of the driver for each allocation."""

from __future__ import annotations

import re
from typing import Final

from npusim.device.hbm import Hbm, OutOfHbmError
from npusim.device.ledger import Owner
from npusim.memory.caching_allocator import CachingAllocator
from npusim.memory.driver import StreamDriver
from npusim.memory.out_of_memory import MORE_THAN_1EB
from npusim.memory.rounding import MAX_REQUEST_BYTES
from npusim.memory.state import LEDGER_GRADE

_SOURCE: Final = "torch_npu 2.13.0 with PYTORCH_NO_NPU_MEMORY_CACHING=1, recorded from the wheel"


def caching_is_off(text: str) -> bool:
    """Whether this value of ``PYTORCH_NO_NPU_MEMORY_CACHING`` switches caching off: a number that is not 0.

    Grade exact: ``1`` and ``2`` do, recorded from torch_npu 2.13.0; ``0``, ``true``, ``yes`` and nothing do not.
    """
    number = re.match(r"\s*[+-]?\d+", text)
    return number is not None and int(number[0]) != 0


class UncachedMemory:
    """Gives tensors memory straight from the driver; a free waits for the device.

    It shows in no statistics, snapshot or pool, and ``record_stream`` does nothing to it. What the caching allocator is
    asked for by name (``caching_allocator_alloc``) or during a graph capture still comes from there, and goes back to
    the device when a pool of a graph or a ``MemPool`` goes. Grade exact, recorded from torch_npu 2.13.0.

    Args:
        hbm: The device's memory.
        driver: The device's streams.
        caching: The device's caching allocator.
        pad_bytes: Bytes added to each request.
        out_of_memory_error: Class of the error for requests of 2^60 bytes and more.
    """

    def __init__(
        self,
        hbm: Hbm,
        driver: StreamDriver,
        caching: CachingAllocator,
        *,
        pad_bytes: int,
        out_of_memory_error: type[Exception],
    ) -> None:
        self._hbm: Final = hbm
        self._driver: Final = driver
        self._caching: Final = caching
        self._pad_bytes: Final = pad_bytes
        self._out_of_memory_error: Final = out_of_memory_error
        self._addresses: Final[set[int]] = set()
        caching.empties_with_pools = True

    def malloc(self, num_bytes: int, stream: int) -> int:
        """Allocate device memory and return its address; 0 for 0 bytes.

        Raises:
            RuntimeError: The device is full; as torch_npu does, with the driver's error, not as out of memory.
            Exception: Of the out-of-memory class, for 2^60 bytes and more.
        """
        if not num_bytes or self._driver.is_current_stream_capturing():
            return self._caching.malloc(num_bytes, stream)
        if num_bytes >= MAX_REQUEST_BYTES:
            raise self._out_of_memory_error(MORE_THAN_1EB)
        try:
            address = self._hbm.malloc(
                num_bytes + self._pad_bytes,
                owner=Owner.TORCH_SEGMENT,
                label="uncached tensors",
                grade=LEDGER_GRADE,
                source=_SOURCE,
            )
        except OutOfHbmError as full:
            raise RuntimeError(
                "NPU function error: c10_npu::acl::AclrtMallocAlign32(&devPtr, alloc_size, "
                "aclrtMemMallocPolicy::ACL_MEM_MALLOC_HUGE_FIRST), error code is 207001\n"
                "[ERROR] ERR00100 PTA call acl api failed\n[Error]: Failed to apply for memory.\n"
                "        Check the remaining storage space in the hardware environment."
            ) from full
        self._addresses.add(address)
        return address

    def free(self, address: int) -> None:
        """Wait for the device and give memory back to it.

        Raises:
            RuntimeError: Nothing allocated starts at ``address``.
        """
        if address not in self._addresses:
            return self._caching.free(address)
        self._addresses.remove(address)
        self._driver.synchronize_device()
        return self._hbm.free(address)

    def record_stream(self, address: int, stream: int) -> None:
        """Does nothing, as a free waits for all streams.

        Raises:
            RuntimeError: Nothing allocated starts at ``address``.
        """
        if address not in self._addresses:
            self._caching.record_stream(address, stream)

    def erase_stream(self, address: int, stream: int) -> None:
        """Does nothing either.

        Raises:
            RuntimeError: Nothing allocated starts at ``address``.
        """
        if address not in self._addresses:
            self._caching.erase_stream(address, stream)
