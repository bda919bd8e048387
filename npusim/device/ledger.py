"""Who owns each byte of HBM in use: the only bookkeeping of device memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from npusim.errors import NpusimError


class Grade(Enum):
    """How far a figure can be trusted: read in a tool, log or source; derived or fitted; picked, having no source."""

    EXACT = "exact"
    CALIBRATED = "calibrated"
    ASSUMED = "assumed"


class Owner(StrEnum):
    """The kinds of owner that a byte of HBM can have."""

    CONTEXT = "driver context"
    OTHER_PROCESS = "other process"
    TORCH_SEGMENT = "torch segment"
    WORKSPACE = "operator workspace"
    HCCL = "HCCL communicator"
    XLITE_POOL = "xlite pool"
    XLITE_TABLES = "xlite tables"
    KERNELS = "operator kernels"
    ACL_GRAPH = "ACL graph"
    RAW = "raw aclrtMalloc"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One holding of HBM: ``num_bytes`` bytes owned by ``owner``, e.g. communicator ``label``."""

    owner: Owner
    label: str
    num_bytes: int
    grade: Grade
    source: str


_Kind = tuple[Owner, str, Grade, str]


class LedgerFullError(NpusimError):
    """A holding would not fit in what is left of the device's memory; nothing was charged."""


class Ledger:
    """All holdings of one device; used bytes are their sum and never exceed the capacity.

    Args:
        capacity_bytes: HBM visible to software, in bytes.

    Attributes:
        used_bytes: In use now.
        peak_bytes: Most in use since the start, or since :meth:`reset_peak`.
        num_changes: Holdings taken and given back so far.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes: Final = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.num_changes = 0
        self._entries: dict[int, LedgerEntry] = {}
        self._next_id = 1
        self._sums: dict[_Kind, int] = {}
        self._peak_sums: dict[_Kind, int] | None = None
        """Taken when the first holding is given back after a peak; None: the peak is now."""

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody owns."""
        return self.capacity_bytes - self.used_bytes

    def charge(self, owner: Owner, label: str, num_bytes: int, grade: Grade, source: str) -> int:
        """Take ``num_bytes`` for an owner and return the holding's id.

        Raises:
            LedgerFullError: Fewer than ``num_bytes`` are free.
            ValueError: ``num_bytes`` is negative.
        """
        if num_bytes < 0:
            raise ValueError(f"a holding cannot be negative: {owner} {label!r} asked for {num_bytes} bytes")
        if num_bytes > self.free_bytes:
            raise LedgerFullError(f"{owner} {label!r} needs {num_bytes} bytes, {self.free_bytes} are free")
        entry_id = self._next_id
        self._next_id += 1
        self._entries[entry_id] = LedgerEntry(owner, label, num_bytes, grade, source)
        kind = (owner, label, grade, source)
        self._sums[kind] = self._sums.get(kind, 0) + num_bytes
        self.used_bytes += num_bytes
        self.num_changes += 1
        if self.used_bytes > self.peak_bytes:
            self.peak_bytes = self.used_bytes
            self._peak_sums = None
        return entry_id

    def release(self, entry_id: int) -> None:
        """Give a holding back.

        Raises:
            KeyError: There is no such holding (any more).
        """
        entry = self._entries.pop(entry_id)
        if self._peak_sums is None:
            self._peak_sums = dict(self._sums)
        self._sums[entry.owner, entry.label, entry.grade, entry.source] -= entry.num_bytes
        self.used_bytes -= entry.num_bytes
        self.num_changes += 1

    def reset_peak(self) -> None:
        """Let the peak start anew from what is in use now."""
        self.peak_bytes = self.used_bytes
        self._peak_sums = None

    def holdings(self) -> tuple[LedgerEntry, ...]:
        """Who holds the bytes in use: one entry per owner and label, without those that hold nothing."""
        return _entries(self._sums)

    def peak_holdings(self) -> tuple[LedgerEntry, ...]:
        """The same for the moment when most were in use."""
        return _entries(self._sums if self._peak_sums is None else self._peak_sums)

    def entries(self) -> tuple[LedgerEntry, ...]:
        """All holdings, oldest first."""
        return tuple(self._entries.values())

    def bytes_by_owner(self) -> dict[Owner, int]:
        """Sum of bytes per kind of owner, in the order of :class:`Owner`, without those that own nothing."""
        sums = dict.fromkeys(Owner, 0)
        for (owner, _, _, _), num_bytes in self._sums.items():
            sums[owner] += num_bytes
        return {owner: num_bytes for owner, num_bytes in sums.items() if num_bytes}


def _entries(sums: dict[_Kind, int]) -> tuple[LedgerEntry, ...]:
    return tuple(
        LedgerEntry(owner, label, num_bytes, grade, source)
        for (owner, label, grade, source), num_bytes in sums.items()
        if num_bytes
    )
