"""``NPUWorkspaceAllocator``: scratch memory of operators outside the caching allocator, one block per stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from npusim.device.hbm import Hbm, OutOfHbmError
from npusim.device.ledger import Owner
from npusim.memory.driver import StreamDriver
from npusim.memory.out_of_memory import OutOfMemoryError, format_size
from npusim.memory.rounding import PAD_BYTES, ROUND_LARGE_BYTES, round_up
from npusim.memory.state import LEDGER_GRADE
from npusim.memory.statistics import Stat

_SOURCE: Final = "torch_npu 9e73e708, NPUWorkspaceAllocator.cpp"


@dataclass(slots=True)
class WorkspaceBlock:
    """The workspace of one stream; address 0 after a growth that failed."""

    address: int = 0
    size: int = 0
    requested_bytes: int = 0


class WorkspaceAllocator:
    """Hands out operator workspaces. A stream's block grows with its largest request and goes only with all others.

    Its memory shows in ``mem_get_info`` and in snapshots, but not in ``memory_stats``.

    Args:
        hbm: The device's memory.
        driver: The device's streams.
        device_index: The device's number, for texts.
        out_of_memory_error: Class of the error when the device is full.

    Attributes:
        blocks: The blocks by stream.
        allocated_bytes: Statistics of bytes in use; with several streams of unequal sizes they drift, as in torch_npu.
        reserved_bytes: Statistics of bytes taken from the device.
    """

    def __init__(
        self,
        hbm: Hbm,
        driver: StreamDriver,
        *,
        device_index: int = 0,
        out_of_memory_error: type[Exception] = OutOfMemoryError,
    ) -> None:
        self.blocks: Final[dict[int, WorkspaceBlock]] = {}
        self.allocated_bytes: Final = Stat()
        self.reserved_bytes: Final = Stat()
        self._hbm: Final = hbm
        self._driver: Final = driver
        self._device_index: Final = device_index
        self._out_of_memory_error: Final = out_of_memory_error
        self._last_size = 0

    def malloc(self, num_bytes: int, stream: int) -> int:
        """The stream's workspace, at least ``num_bytes`` long; 32 bytes are added to each request.

        Raises:
            Exception: Of the out-of-memory class, if the device is full; no cached memory is given up for it.
        """
        needed = num_bytes + PAD_BYTES
        block = self.blocks.setdefault(stream, WorkspaceBlock())
        if block.size < needed:
            if block.address:
                self._driver.synchronize_device()
                self._give_back(block)
            block.size = round_up(needed, ROUND_LARGE_BYTES)
            label = f"stream {stream}"
            try:
                block.address = self._hbm.malloc(
                    block.size, owner=Owner.WORKSPACE, label=label, grade=LEDGER_GRADE, source=_SOURCE
                )
            except OutOfHbmError as full:
                raise self._out_of_memory(num_bytes) from full
            block.requested_bytes = num_bytes
            self.reserved_bytes.add(block.size)
        self._last_size = block.size
        self.allocated_bytes.add(block.size)
        if not block.address:
            raise self._out_of_memory(num_bytes)
        return block.address

    def free(self) -> None:
        """Note the end of the last use; the memory stays with its stream."""
        self.allocated_bytes.add(-self._last_size)

    def empty_cache(self) -> None:
        """Give all workspaces back to the device."""
        for block in self.blocks.values():
            if block.address:
                self._give_back(block)
        self.blocks.clear()

    def _give_back(self, block: WorkspaceBlock) -> None:
        self._hbm.free(block.address)
        block.address = 0
        self.reserved_bytes.add(-block.size)

    def _out_of_memory(self, num_bytes: int) -> Exception:
        free_bytes, total_bytes = self._hbm.mem_get_info()
        return self._out_of_memory_error(
            f"NPU out of memory. NPUWorkspaceAllocator tried to allocate {format_size(num_bytes)}"
            f"(NPU {self._device_index}; {format_size(total_bytes)} total capacity; {format_size(free_bytes)} free). "
            "If you want to reduce memory usage, take a try to set the environment variable TASK_QUEUE_ENABLE=1.\n"
        )
