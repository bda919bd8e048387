"""One simulated card (or die): its memory, its streams, and what the driver takes for itself."""

from __future__ import annotations

import simpy

from npusim.device.event_log import EventLog
from npusim.device.faults import HbmFaults, OtherProcess
from npusim.device.hbm import Hbm
from npusim.device.ledger import Grade, Ledger, Owner
from npusim.device.profile import DeviceProfile, Fact
from npusim.device.streams import Streams
from npusim.errors import WorldError


class Card:
    """A device as its driver presents it.

    Args:
        index: The device's number.
        profile: What kind of device it is.
        clock: Virtual time of the world.
        event_log: The world's event log.
        total_bytes: Memory of this device, if it is not the profile's.
        free_bytes: Free at the first look of the process under test; what others do not hold of the rest is that
            process' context. Default: all but the profile's context and the other processes.
        other_processes: Bytes that other processes hold, by name.

    Raises:
        WorldError: The sizes contradict each other.
    """

    def __init__(
        self,
        index: int,
        profile: DeviceProfile,
        clock: simpy.Environment,
        event_log: EventLog,
        *,
        total_bytes: int | None = None,
        free_bytes: int | None = None,
        other_processes: dict[str, int] | None = None,
    ) -> None:
        self.index = index
        self.profile = profile
        self.event_log = event_log
        self.ledger = Ledger(profile.total_bytes.value if total_bytes is None else total_bytes)
        self.faults = HbmFaults()
        self.hbm = Hbm(self.ledger, event_log, device_index=index, faults=self.faults)
        self.streams = Streams(clock)
        self._launched_operator = False
        self.other_processes = self._admit(other_processes or {}, free_bytes)

    @property
    def default_stream(self) -> int:
        """Handle of the default stream."""
        return self.streams.default_stream

    def launch(self, operator: str, stream: int) -> None:
        """An operator was queued; the process' first one loads the operator library."""
        del operator
        if not self._launched_operator:
            self._launched_operator = True
            self.charge(Owner.KERNELS, "operator library", self.profile.operator_library_bytes)
        self.streams.enqueue(stream, 0.0)

    def charge(self, owner: Owner, label: str, fact: Fact[int]) -> int:
        """Take memory that the driver or a library takes for itself; returns the ledger's id."""
        self.event_log.record("charge", self.index, owner.value, label, fact.value)
        return self.ledger.charge(owner, label, fact.value, fact.grade, fact.source)

    def _admit(self, other_processes: dict[str, int], free_bytes: int | None) -> dict[str, OtherProcess]:
        total_bytes = self.ledger.capacity_bytes
        others_bytes = sum(other_processes.values())
        context = self.profile.context_bytes
        if free_bytes is not None:
            context = Fact(total_bytes - free_bytes - others_bytes, Grade.EXACT, "the scenario's free memory at start")
        if context.value < 0 or context.value + others_bytes > total_bytes:
            own = f"{context.value} bytes of context" if free_bytes is None else f"{free_bytes} free bytes"
            raise WorldError(
                f"device {self.index}: {own} and {others_bytes} bytes of other processes exceed {total_bytes} bytes"
            )
        admitted = {name: OtherProcess(self.ledger, name, num_bytes) for name, num_bytes in other_processes.items()}
        self.charge(Owner.CONTEXT, "process context", context)
        return admitted
