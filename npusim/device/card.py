"""One simulated card (or die): its memory, its streams, and what the driver takes for itself."""

from __future__ import annotations

import math

from npusim.device.clock import Agenda, Clock
from npusim.device.cost import BARE_LOOP, CostModel, HostCosts
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
        host_costs: What launching work costs the host.

    Attributes:
        collective_delay_ns: How late it comes to its next HCCL collective.
        slowdown: Every kernel takes so many times as long as the profile says; for a device that is slower than others.

    Raises:
        WorldError: The sizes contradict each other.
    """

    def __init__(
        self,
        index: int,
        profile: DeviceProfile,
        clock: Clock,
        event_log: EventLog,
        *,
        total_bytes: int | None = None,
        free_bytes: int | None = None,
        other_processes: dict[str, int] | None = None,
        host_costs: HostCosts = BARE_LOOP,
    ) -> None:
        self.index = index
        self.profile = profile
        self.event_log = event_log
        self.ledger = Ledger(profile.total_bytes.value if total_bytes is None else total_bytes)
        self.faults = HbmFaults()
        self.clock = clock
        self.agenda = Agenda(clock)
        self.hbm = Hbm(self.ledger, event_log, device_index=index, faults=self.faults, agenda=self.agenda)
        self.streams = Streams(clock)
        self.costs = CostModel(profile)
        self.host_costs = host_costs
        self.slowdown = 1.0
        self.collective_delay_ns = 0
        self._launched_operator = False
        self.other_processes = self._admit(other_processes or {}, free_bytes)

    @property
    def default_stream(self) -> int:
        """Handle of the default stream."""
        return self.streams.default_stream

    def launch(
        self,
        operator: str,
        stream: int,
        duration_ns: int,
        *,
        not_before_ns: int = 0,
        slowdown: float | None = None,
    ) -> None:
        """The host queues an operator, which takes the host's time, too; the first one loads the operator library.

        Args:
            operator: Its name.
            stream: Handle of the stream that it runs on.
            duration_ns: How long it occupies the stream.
            not_before_ns: Earliest start, e.g. when others arrive with whom it communicates.
            slowdown: Instead of the card's own.
        """
        del operator
        if not self._launched_operator:
            self._launched_operator = True
            self.charge(Owner.KERNELS, "operator library", self.profile.operator_library_bytes)
        if self.clock.spend(self.host_costs.operator_ns) >= self.agenda.next_ns:
            self.agenda.catch_up()
        factor = self.slowdown if slowdown is None else slowdown
        if factor != 1.0 and not self.streams.is_captured(stream):  # which the replay is, as a whole
            duration_ns = round(duration_ns * factor)
        self.streams.enqueue(stream, duration_ns, not_before_ns=not_before_ns)

    def stall(self, duration_ns: int) -> None:
        """The device hangs: every stream stands still for so long."""
        self.streams.delay(duration_ns)

    def slow_down(self, factor: float) -> None:
        """From now on every kernel takes ``factor`` times as long as the profile says.

        Raises:
            WorldError: The factor is not positive.
        """
        if not 0 < factor < math.inf:
            raise WorldError(f"device {self.index}: a slowdown must be a positive number, got {factor}")
        self.slowdown = factor

    def delay_next_collective(self, duration_ns: int) -> None:
        """The device comes so late to its next HCCL collective."""
        self.collective_delay_ns = duration_ns

    def take_collective_delay(self) -> int:
        """How late the device comes to the collective that it goes to now."""
        delay_ns, self.collective_delay_ns = self.collective_delay_ns, 0
        return delay_ns

    def copy(self, stream: int, duration_ns: int, *, waits: bool) -> None:
        """The host queues a copy from or to its memory.

        Args:
            stream: Handle of the stream that it runs on.
            duration_ns: How long it occupies the stream.
            waits: Whether the host waits until it is done.
        """
        self.clock.spend(self.host_costs.operator_ns)
        self.streams.enqueue(stream, duration_ns)
        if waits:
            self.streams.synchronize_stream(stream)

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
