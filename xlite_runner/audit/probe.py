"""Runs the cases of an audit on a worker and measures each, by the vendor's counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch_npu

from xlite_runner.audit.cases import AuditCase, audit_cases
from xlite_runner.memory_profiling import MemoryUse
from xlite_runner.result import LedgerRow

if TYPE_CHECKING:
    from xlite_runner.worker import NPUWorker


HCCL_OUT_OF_MEMORY = "error code is 3\n"
"""HCCL_E_MEMORY in the text of torch_npu's error (exact: hccl_types.h)."""


class DeviceLedger(Protocol):
    """Who holds a rank's device memory, where somebody knows."""

    def outside_torch(self, rank: int) -> Sequence[LedgerRow]:
        """Who holds memory now, other than torch's caching allocator."""
        ...

    def peak(self, rank: int) -> Sequence[LedgerRow]:
        """Who held memory when most was in use since the last call of :meth:`reset_peak`."""
        ...

    def reset_peak(self, rank: int) -> None:
        """Let the peak start anew from now."""
        ...


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One case on one rank, in bytes.

    Memory that torch does not own only grows during a step, so that what was in use at the worst moment is at most
    the allocator's peak and what others held at the end.

    Attributes:
        before: What was in use before the case.
        after: What was in use after it.
        peak_allocated_bytes: Most in torch's tensors.
        peak_reserved_bytes: Most held by torch's caching allocator.
        grown: Memory outside of torch that the case took and kept, by owner; empty where nobody knows.
        ledger_peak: Who held the memory at the worst moment; empty where nobody knows.
        error: Why the case could not be run to its end; without the frames that would keep its tensors alive.
    """

    case: AuditCase
    before: MemoryUse
    after: MemoryUse
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    grown: tuple[LedgerRow, ...] = ()
    ledger_peak: tuple[LedgerRow, ...] = ()
    error: Exception | None = None

    @property
    def kept(self) -> MemoryUse:
        """What is in use for good; a case that failed may not have let go of its tensors."""
        return self.after if self.error is None else self.before

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the case failed for want of memory, so that its peak is lower than it would be."""
        return isinstance(self.error, torch.OutOfMemoryError) or HCCL_OUT_OF_MEMORY in str(self.error)

    def peak_in_use_bytes(self, free_at_start: int) -> int:
        """Most in use at any moment of the case, beyond what was before the worker's start."""
        non_torch = max(free_at_start - use.free_bytes - use.reserved_bytes for use in (self.before, self.after))
        return self.peak_reserved_bytes + non_torch


def run_audit(
    worker: NPUWorker, num_blocks: int, ledger: DeviceLedger | None = None, cases: Sequence[AuditCase] | None = None
) -> list[Measurement]:
    """Run cases; the first that fails is the last.

    Args:
        worker: With a KV cache, ready to serve. All ranks have to do this at the same time.
        num_blocks: Blocks of the KV cache.
        ledger: Who holds the device's memory.
        cases: By default all that the worker's configuration admits.
    """
    measurements: list[Measurement] = []
    for case in audit_cases(worker.config) if cases is None else cases:
        measurements.append(_measure(case, worker, num_blocks, ledger))
        if measurements[-1].error is not None:
            break
    return measurements


def _measure(case: AuditCase, worker: NPUWorker, num_blocks: int, ledger: DeviceLedger | None) -> Measurement:
    device, rank = worker.device, worker.rank
    torch_npu.npu.synchronize()
    torch_npu.npu.reset_peak_memory_stats(device)
    held: Sequence[LedgerRow] = ()
    if ledger is not None:
        ledger.reset_peak(rank)
        held = ledger.outside_torch(rank)
    before = MemoryUse.measure(device)
    error: Exception | None = None
    try:
        case.run(worker, num_blocks)
        torch_npu.npu.synchronize()
    except Exception as failure:  # noqa: BLE001 - that serving fails is what is looked for
        error = failure.with_traceback(None)
        error.__cause__ = error.__context__ = None
    stats = torch_npu.npu.memory_stats(device)
    return Measurement(
        case=case,
        before=before,
        after=MemoryUse.measure(device),
        peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
        peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
        grown=() if ledger is None else _growth(held, ledger.outside_torch(rank)),
        ledger_peak=() if ledger is None else tuple(ledger.peak(rank)),
        error=error,
    )


def _growth(before: Sequence[LedgerRow], after: Sequence[LedgerRow]) -> tuple[LedgerRow, ...]:
    held = {(row.owner, row.label): row.num_bytes for row in before}
    grown = (replace(row, num_bytes=row.num_bytes - held.get((row.owner, row.label), 0)) for row in after)
    return tuple(row for row in grown if row.num_bytes > 0)
