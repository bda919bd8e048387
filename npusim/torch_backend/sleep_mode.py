"""What vllm-ascend's compiled extension does for sleep mode: memory that keeps its address while it is given up.

``vllm_ascend/device_allocator/camem.py`` puts weights and KV cache into memory pools whose segments the extension
makes: a reserved address range with physical memory mapped into it. To sleep, the physical memory goes back to the
device; to wake up, new memory is mapped at the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from npusim.device.hbm import PAGE_BYTES
from npusim.device.ledger import Grade, Owner
from npusim.errors import UnmodelledCallError, WorldError
from npusim.memory.rounding import round_up

if TYPE_CHECKING:
    from npusim.device.card import Card
    from npusim.torch_backend.storage import StorageRecord, StorageTable

Handle = tuple[int, int, int, int]
"""Device, bytes, address, and where the handle of the physical memory is kept."""

_SOURCE: Final = "vllm-ascend 0e811bef, csrc/camem_allocator.cpp"


class SleepModeMemory:
    """The extension's memory, and the copies that keep tensors over a sleep.

    Segments are whole pages of 2 MiB. Grade exact for the sequence of driver calls, read in the source; the granularity
    is that of :data:`npusim.device.hbm.PAGE_BYTES`.

    Args:
        cards: The devices by index.
        storages: The live tensors' memory.
    """

    def __init__(self, cards: Sequence[Card], storages: StorageTable) -> None:
        self._cards: Final = cards
        self._storages: Final = storages
        self._on_malloc: Callable[[Handle], object] | None = None
        self._on_free: Callable[[int], Handle] | None = None
        self._num_handles = 0
        self._physical: Final[dict[int, int]] = {}
        self._devices: Final[dict[int, int]] = {}
        self._host_copies: Final[dict[int, dict[int, Any]]] = {}

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The C functions that the extension exports, for ``NPUPluggableAllocator``."""
        return {"my_malloc": self.malloc, "my_free": self.free}

    def init(self, on_malloc: Callable[[Handle], object], on_free: Callable[[int], Handle]) -> None:
        """Take the callbacks: one is told of each new segment, one asked for the handle of a segment that goes.

        Raises:
            TypeError: One cannot be called; with the extension's text.
        """
        if not callable(on_malloc) or not callable(on_free):
            raise TypeError("Both arguments must be callables")
        self._on_malloc, self._on_free = on_malloc, on_free

    def malloc(self, num_bytes: int, device: int, stream: int) -> int:
        """Make a segment and return its address.

        Raises:
            WorldError: :meth:`init` was not called.
            OutOfHbmError: The device is full. The extension goes on then, and a later kernel faults on a card.
            UnmodelledCallError: Two devices of this process use sleep mode: the callbacks tell segments apart by
                addresses, which differ in processes of their own only.
        """
        del stream
        if self._on_malloc is None:
            raise WorldError("vllm_ascend_C.init_module was not called before the first allocation")
        size = round_up(num_bytes, PAGE_BYTES)
        address = self._cards[device].hbm.reserve(size)
        if self._devices.setdefault(address, device) != device:
            raise UnmodelledCallError(
                f"sleep mode on devices {self._devices[address]} and {device} of one process is not modelled"
            )
        self._num_handles += 1
        self._on_malloc((device, size, address, self._num_handles))
        self.create_and_map(device, size, address, self._num_handles)
        return address

    def free(self, address: int, num_bytes: int, device: int, stream: int) -> None:
        """Give a segment up for good; one that sleeps has its addresses only."""
        del num_bytes, stream
        assert self._on_free is not None
        _, size, _, place = self._on_free(address)
        if place in self._physical:
            self.unmap_and_release(device, size, address, place)
        self._cards[device].hbm.release(address)
        del self._devices[address]

    def create_and_map(self, device: int, size: int, address: int, place: int) -> None:
        """Map new physical memory of ``size`` bytes at ``address``; what it holds is unknown.

        Raises:
            OutOfHbmError: The device is full.
        """
        hbm = self._cards[device].hbm
        handle = hbm.create_physical(
            size, owner=Owner.TORCH_SEGMENT, label="sleep mode", grade=Grade.EXACT, source=_SOURCE
        )
        hbm.map(address, handle)
        self._physical[place] = handle

    def unmap_and_release(self, device: int, size: int, address: int, place: int) -> None:
        """Give the physical memory at ``address`` back; what it held is lost.

        Raises:
            HbmAddressError: Nothing is mapped there.
        """
        hbm = self._cards[device].hbm
        hbm.destroy_physical(hbm.unmap(address))
        del self._physical[place]
        for record in self._storages_in(address, size):
            record.value = None

    def copy_to_host(self, host_address: int, address: int, num_bytes: int) -> None:
        """Remember what device memory holds as the content of a host buffer, whose bytes stay as they are."""
        self._host_copies[host_address] = {
            record.address - address: record.value for record in self._storages_in(address, num_bytes)
        }

    def copy_to_device(self, address: int, host_address: int, num_bytes: int) -> None:
        """Put back what :meth:`copy_to_host` remembered.

        Raises:
            UnmodelledCallError: Nothing was copied to that host buffer.
        """
        copies = self._host_copies.pop(host_address, None)
        if copies is None:
            raise UnmodelledCallError(
                f"acl.rt.memcpy from host address {host_address:#x} is modelled only after a copy from a device to it"
            )
        for record in self._storages_in(address, num_bytes):
            record.value = copies.get(record.address - address)

    def _storages_in(self, address: int, num_bytes: int) -> list[StorageRecord]:
        device = self._devices.get(address)
        return [
            record
            for record in self._storages
            if record.device.card.index == device and address <= record.address < address + num_bytes
        ]
