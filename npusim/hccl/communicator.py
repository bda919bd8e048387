"""An HCCL communicator and the device memory that it takes at its first operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from npusim.device.card import Card
from npusim.device.ledger import Grade, Owner

DEFAULT_BUFFER_MB: Final = 200
"""Megabytes (2^20) per direction without ``HCCL_BUFFSIZE``. Exact: hiascend.com, HCCL_BUFFSIZE, CANN 8.0 to 9.0."""
WINDOW_BYTES: Final = 1 << 20
"""Window for MC2 operators, in the same allocation as the two buffers. Exact: cann-hcomm b5f3e5be, ccl_buffer_manager.cc."""
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
    """

    buffer_mb: int = DEFAULT_BUFFER_MB
    uses_aiv: bool = False


class HcclRuntime:
    """HCCL's side of one process on one device: which communicators have worked yet.

    Args:
        card: The device.
        settings: From the environment.
    """

    def __init__(self, card: Card, settings: HcclSettings) -> None:
        self.card = card
        self.settings = settings
        self.num_working_communicators = 0

    def communicator(self, name: str, num_ranks: int, buffer_mb: int | None = None) -> Communicator:
        """Create a communicator; that takes no device memory.

        Args:
            name: Group name, for the ledger.
            num_ranks: Ranks in the group.
            buffer_mb: Megabytes per direction from the group's options; default: the environment's.
        """
        return Communicator(self, name, num_ranks, self.settings.buffer_mb if buffer_mb is None else buffer_mb)


class Communicator:
    """One communicator: idle until its first operation, which takes its buffers for good.

    Grade of the rule: exact, for connect mode 0 (the default).
    """

    def __init__(self, runtime: HcclRuntime, name: str, num_ranks: int, buffer_mb: int) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self.buffer_mb = buffer_mb
        self._runtime = runtime
        self._is_working = False
        self._has_mc2_workspace = False

    def operate(self) -> None:
        """A collective runs: the first one on a group of several ranks takes the buffers.

        Raises:
            OutOfHbmError: The device has no room for them.
        """
        if self._is_working or self.num_ranks == 1:
            return
        self._is_working = True
        card, profile = self._runtime.card, self._runtime.card.profile
        self._malloc("in and out buffers, window", 2 * (self.buffer_mb << 20) + WINDOW_BYTES)
        if self._runtime.settings.uses_aiv:
            self._malloc("AIV buffers", AIV_DATA_BYTES + AIV_FLAG_BYTES + AIV_INFO_BYTES)
        self._runtime.num_working_communicators += 1
        if self._runtime.num_working_communicators == 1:
            card.charge(Owner.HCCL, "runtime, first communicator", profile.hccl_runtime_bytes)
        else:
            card.charge(Owner.HCCL, f"{self.name}: control memory", profile.communicator_control_bytes)

    def operate_mc2(self) -> None:
        """An MC2 operator runs on this communicator: buffers as for a collective, and a workspace of its own."""
        self.operate()
        if not self._has_mc2_workspace:
            self._has_mc2_workspace = True
            self._runtime.card.charge(
                Owner.HCCL, f"{self.name}: MC2 workspace", self._runtime.card.profile.mc2_workspace_bytes
            )

    def _malloc(self, what: str, num_bytes: int) -> None:
        self._runtime.card.hbm.malloc(
            num_bytes, owner=Owner.HCCL, label=f"{self.name}: {what}", grade=Grade.EXACT, source=_SOURCE
        )
