"""An HCCL communicator and the device memory that it takes at its first operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from npusim.device.card import Card
from npusim.device.hbm import OutOfHbmError
from npusim.device.ledger import Grade, LedgerFullError, Owner
from npusim.device.profile import Fact

DEFAULT_BUFFER_MB: Final = 200
"""Megabytes (2^20) per direction without ``HCCL_BUFFSIZE``. Exact: hiascend.com, HCCL_BUFFSIZE, CANN 8.0 to 9.0."""
DEFAULT_EXEC_TIMEOUT_S: Final = 1836
"""Seconds without ``HCCL_EXEC_TIMEOUT``. Exact: public logs of CANN 8 (LLaMA-Factory issue #5347)."""
WINDOW_BYTES: Final = 1 << 20
"""Window for MC2 operators, in the allocation of the two buffers. Exact: cann-hcomm b5f3e5be, ccl_buffer_manager.cc."""
AIV_DATA_BYTES: Final = 36 << 20
AIV_FLAG_BYTES: Final = 4 << 20
AIV_INFO_BYTES: Final = 32 << 10
"""Taken besides the buffers when ``HCCL_OP_EXPANSION_MODE=AIV``. Exact: cann-hcomm b5f3e5be, ccl_buffer_manager.h."""

_SOURCE = "cann-hcomm b5f3e5be (2026-04-07), ccl_buffer_manager.cc"


@dataclass(frozen=True, slots=True)
class HcclSettings:
    """What the environment says about HCCL.

    Attributes:
        buffer_mb: ``HCCL_BUFFSIZE``, in megabytes (2^20) per direction.
        uses_aiv: Whether ``HCCL_OP_EXPANSION_MODE`` is ``AIV`` and ``HCCL_DETERMINISTIC`` does not forbid it.
        exec_timeout_s: ``HCCL_EXEC_TIMEOUT``: seconds that ranks wait for each other in a collective; 0: for ever.
    """

    buffer_mb: int = DEFAULT_BUFFER_MB
    uses_aiv: bool = False
    exec_timeout_s: int = DEFAULT_EXEC_TIMEOUT_S


class HcclRuntime:
    """HCCL's side of one process on one device.

    Args:
        card: The device.
        settings: From the environment.

    Attributes:
        has_worked: Whether any communicator has done an operation yet.
    """

    def __init__(self, card: Card, settings: HcclSettings) -> None:
        self.card = card
        self.settings = settings
        self.has_worked = False

    def communicator(self, name: str, num_ranks: int, buffer_mb: int | None = None) -> Communicator:
        """Create a communicator; that takes no device memory.

        Args:
            name: Group name, for the ledger.
            num_ranks: Ranks in the group.
            buffer_mb: Megabytes per direction from the group's options; default: the environment's.
        """
        return Communicator(self, name, num_ranks, self.settings.buffer_mb if buffer_mb is None else buffer_mb)

    def charge(self, label: str, fact: Fact[int]) -> int:
        """Take memory besides the buffers; returns the ledger's id.

        Raises:
            OutOfHbmError: The device has no room for it.
        """
        try:
            return self.card.charge(Owner.HCCL, label, fact)
        except LedgerFullError as full:
            raise OutOfHbmError(fact.value, self.card.ledger.free_bytes, "the device is full") from full


class Communicator:
    """One communicator: idle until its first operation, which takes its buffers until :meth:`destroy`.

    Grade of the rule: exact, for connect mode 0 (the default).
    """

    def __init__(self, runtime: HcclRuntime, name: str, num_ranks: int, buffer_mb: int) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self.buffer_mb = buffer_mb
        self._runtime = runtime
        self._addresses: list[int] = []
        self._holdings: list[int] = []
        self._has_mc2_workspace = False

    def operate(self) -> None:
        """A collective runs: the first one on a group of several ranks takes the buffers.

        Raises:
            OutOfHbmError: The device has no room for them; then it has taken nothing.
        """
        if self._addresses or self.num_ranks == 1:
            return
        runtime = self._runtime
        try:
            self._malloc("in and out buffers, window", 2 * (self.buffer_mb << 20) + WINDOW_BYTES)
            if runtime.settings.uses_aiv:
                self._malloc("AIV buffers", AIV_DATA_BYTES + AIV_FLAG_BYTES + AIV_INFO_BYTES)
            profile = runtime.card.profile
            if runtime.has_worked:
                self._charge("control memory", profile.communicator_control_bytes)
            else:
                runtime.charge("runtime, first communicator", profile.hccl_runtime_bytes)
                runtime.has_worked = True
        except OutOfHbmError:
            self.destroy()
            raise

    def operate_mc2(self) -> None:
        """An MC2 operator runs on this communicator: buffers as for a collective, and a workspace of its own.

        Raises:
            OutOfHbmError: The device has no room for them.
        """
        self.operate()
        if not self._has_mc2_workspace:
            self._charge("MC2 workspace", self._runtime.card.profile.mc2_workspace_bytes)
            self._has_mc2_workspace = True

    def destroy(self) -> None:
        """Give everything back but what the process' first communicator took for all. Grade: assumed."""
        for address in self._addresses:
            self._runtime.card.hbm.free(address)
        for holding in self._holdings:
            self._runtime.card.ledger.release(holding)
        self._addresses.clear()
        self._holdings.clear()
        self._has_mc2_workspace = False

    def _malloc(self, what: str, num_bytes: int) -> None:
        address = self._runtime.card.hbm.malloc(
            num_bytes, owner=Owner.HCCL, label=f"{self.name}: {what}", grade=Grade.EXACT, source=_SOURCE
        )
        self._addresses.append(address)

    def _charge(self, what: str, fact: Fact[int]) -> None:
        self._holdings.append(self._runtime.charge(f"{self.name}: {what}", fact))
