"""Compares what serving's worst moment took with what the start-up reserved, term by term."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from xlite_runner.audit.probe import Measurement
from xlite_runner.audit.result import CaseResult, Finding, RankAudit, Term, Verdict
from xlite_runner.audit.sleep import undefined_after_sleep
from xlite_runner.budget import suggest_kv_cache_memory
from xlite_runner.kv_cache.planning import KVCacheConfig
from xlite_runner.memory_profiling import MemoryUse
from xlite_runner.models.attention_metadata import MASK_SIZE
from xlite_runner.result import Grade, LedgerRow

if TYPE_CHECKING:
    from xlite_runner.worker import NPUWorker

GRADES: tuple[Grade, ...] = ("exact", "calibrated", "assumed")
RUNNER_BUFFERS = "runner buffers made before the weight meter"
XLITE_BUFFERS = "xlite hidden_states and freq_cis"
SEGMENTS = "segments of torch's caching allocator beyond its tensors"
CAUSAL_MASK = "causal mask"
KV_ALIGNMENT = "KV cache beyond its plan (alignment for KV transfer)"
GRAPHS = "graph capture and warm-up"
MEASURED = "measured on the device"
KEPT = "tensors that steps leave behind (mask, sampling tables)"
NON_TORCH_OF_SERVING = "non-torch memory first used by serving"


def audit_rank(
    worker: NPUWorker, plan: KVCacheConfig, measurements: Sequence[Measurement], configured_blocks: int | None = None
) -> RankAudit:
    """What the measurements of one rank mean.

    Args:
        worker: After its start.
        plan: Its KV cache.
        measurements: Of all cases.
        configured_blocks: Blocks of the KV cache that the configuration leads to, if ``plan`` is smaller.
    """
    account = _Account(worker, plan, plan.num_blocks if configured_blocks is None else configured_blocks)
    # The last of equals: segments stay as large as an earlier case made them.
    worst = max(reversed(measurements), key=account.peak_in_use)
    until_worst = measurements[: measurements.index(worst) + 1]
    last = measurements[-1]
    failures = list(undefined_after_sleep(worker))
    if last.error is not None:
        failures.append(
            Finding(
                subject="serving fails", when=last.case.name, num_bytes=None, grade="exact", source=_text(last.error)
            )
        )
    fails = bool(failures) and not last.ran_out_of_memory
    verdicts = account.verdicts(worst, fails=fails)
    shortfalls = account.shortfalls(until_worst) if verdicts[0].margin_bytes < 0 else ()
    return RankAudit(
        rank=worker.rank,
        worst_case=worst.case.name,
        verdicts=verdicts,
        terms=account.terms(until_worst),
        findings=(*failures, *sorted(shortfalls, key=lambda finding: -(finding.num_bytes or 0))),
        cases=tuple(
            CaseResult(
                name=case.case.name,
                in_use_bytes=account.peak_in_use(case),
                unreserved_tensor_bytes=account.unreserved_tensor_bytes(case),
                error=None if case.error is None else _text(case.error),
                peak_ledger=case.ledger_peak,
            )
            for case in measurements
        ),
        ran_out_of_memory=last.case.name if last.ran_out_of_memory else None,
    )


class _Account:
    """The books of one rank, in bytes. "In use" is meant beyond what was in use before the worker's start.

    Args:
        worker: After its start.
        plan: Its KV cache.
        configured_blocks: Blocks of the KV cache that all figures are for.
    """

    def __init__(self, worker: NPUWorker, plan: KVCacheConfig, configured_blocks: int) -> None:
        memory = worker.memory
        self._worker, self._memory, self._plan = worker, memory, plan
        self._block = plan.group.bytes_per_block
        self.kv_cache_bytes = configured_blocks * self._block
        self._not_allocated = (configured_blocks - plan.num_blocks) * self._block
        self.free_at_start = memory.init_snapshot.free_memory
        self.weights = worker.model_runner.model_memory_usage
        stages = memory.after_stage
        self.runner_buffers = stages["init_device"].allocated_bytes
        self.xlite_buffers = stages["load_model"].allocated_bytes - self.runner_buffers - self.weights
        self.profiled = stages["determine_available_memory"]
        self.with_kv_cache = stages["initialize_from_config"]
        self.ready = stages["compile_or_warm_up_model"]

    def peak_in_use(self, case: Measurement) -> int:
        return case.peak_in_use_bytes(self.free_at_start) + self._not_allocated

    def in_use(self, use: MemoryUse) -> int:
        return self.free_at_start - use.free_bytes

    def non_torch(self, use: MemoryUse) -> int:
        return self.in_use(use) - use.reserved_bytes

    def verdicts(self, worst: Measurement, *, fails: bool) -> tuple[Verdict, ...]:
        """For the configuration as it is, and for the two values that upstream's log proposes."""
        memory, cache, non_kv = self._memory, self._worker.config.cache, self._memory.non_kv
        sizes = [(f"gpu_memory_utilization={cache.gpu_memory_utilization}", self.kv_cache_bytes, memory.requested)]
        if non_kv is None:
            sizes = [(f"--kv-cache-memory={cache.kv_cache_memory_bytes}", self.kv_cache_bytes, self.free_at_start)]
        else:
            suggested = suggest_kv_cache_memory(memory.requested, self.free_at_start, non_kv, memory.graph)
            for size, budget in ((suggested.fit_requested, memory.requested), (suggested.use_free, self.free_at_start)):
                sizes.append((f"--kv-cache-memory={size}", size // self._block * self._block, budget))
        in_use = self.peak_in_use(worst) - self.kv_cache_bytes
        return tuple(
            Verdict(
                setting=setting,
                kv_cache_bytes=size,
                budget_bytes=int(budget),
                in_use_bytes=in_use + size,
                free_at_start_bytes=self.free_at_start,
                fails=fails,
            )
            for setting, size, budget in sizes
        )

    def terms(self, until_worst: Sequence[Measurement]) -> tuple[Term, ...]:
        """All parts of what was in use at the worst moment, that of the last case."""
        memory, non_kv = self._memory, self._memory.non_kv
        worst = until_worst[-1]
        largest = self._transient(self._largest_step(until_worst))
        rows: list[tuple[str, int, int]] = [
            ("weights", non_kv.weights if non_kv else 0, self.weights),
            ("peak of a step's tensors", non_kv.peak_activation if non_kv else 0, largest),
            ("non-torch memory when profiled", non_kv.non_torch if non_kv else 0, self.non_torch(self.profiled)),
            ("KV cache", int(memory.available_kv_cache), self._kv_cache),
            (GRAPHS, memory.graph_estimate, self._graphs),
            (RUNNER_BUFFERS, 0, self.runner_buffers),
            (XLITE_BUFFERS, 0, self.xlite_buffers),
            (KEPT, 0, self._kept(worst)),
            (NON_TORCH_OF_SERVING, 0, self._non_torch_of_serving(worst)),
            (SEGMENTS, 0, self._segments(worst, largest)),
            ("measured by policy audited", non_kv.serving if non_kv else 0, 0),
        ]
        return tuple(
            Term(name=name, reserved_bytes=reserved if non_kv or name == "KV cache" else None, needed_bytes=needed)
            for name, reserved, needed in rows
        )

    def unreserved_tensor_bytes(self, case: Measurement) -> int | None:
        """See :class:`CaseResult`."""
        non_kv = self._memory.non_kv
        if non_kv is None:
            return None
        buffers = self.runner_buffers + self.xlite_buffers
        beyond_profile = self._transient(case) - non_kv.peak_activation
        return buffers + self._kept(case) + self._non_torch_of_serving(case) + beyond_profile

    def shortfalls(self, until_worst: Sequence[Measurement]) -> Iterator[Finding]:
        """What was not reserved, part by part."""
        non_kv = self._memory.non_kv
        worst, largest_step = until_worst[-1], self._largest_step(until_worst)
        largest = self._transient(largest_step)
        beyond_profile = largest - (non_kv.peak_activation if non_kv else 0)
        sizes = [
            (RUNNER_BUFFERS, "init_device", self.runner_buffers),
            (XLITE_BUFFERS, "load_model", self.xlite_buffers),
            (KV_ALIGNMENT, "initialize_from_config", self._kv_cache - self.kv_cache_bytes),
            (GRAPHS, "compile_or_warm_up_model", self._graphs - self._memory.graph_estimate),
            (largest_step.case.excess, largest_step.case.name, beyond_profile),
            (SEGMENTS, worst.case.name, self._segments(worst, largest)),
        ]
        for subject, when, num_bytes in sizes:
            if num_bytes > 0:
                yield Finding(subject=subject, when=when, num_bytes=num_bytes, grade="exact", source=MEASURED)
        for case in until_worst:
            yield from _left_behind(case, is_first=case is until_worst[0])
            yield from _grown(case, self.non_torch(case.after) - self.non_torch(case.before))

    @property
    def _kv_cache(self) -> int:
        return self.with_kv_cache.allocated_bytes - self.profiled.allocated_bytes + self._not_allocated

    @property
    def _graphs(self) -> int:
        return self.in_use(self.ready) - self.in_use(self.with_kv_cache)

    def _largest_step(self, cases: Sequence[Measurement]) -> Measurement:
        """Whose tensors made the allocator's segments as large as they are."""
        return max(cases, key=self._transient)

    def _transient(self, case: Measurement) -> int:
        return case.peak_allocated_bytes - case.kept.allocated_bytes

    def _kept(self, case: Measurement) -> int:
        buffers = self.runner_buffers + self.weights + self.xlite_buffers
        return case.kept.allocated_bytes - self.ready.allocated_bytes + self.profiled.allocated_bytes - buffers

    def _non_torch_of_serving(self, case: Measurement) -> int:
        return case.peak_in_use_bytes(self.free_at_start) - case.peak_reserved_bytes - self.non_torch(self.ready)

    def _segments(self, worst: Measurement, largest_step: int) -> int:
        """What the allocator held and no other term has."""
        tensors = self.weights + self.runner_buffers + self.xlite_buffers + self._kv_cache
        tensors += self._kept(worst) + largest_step
        others = self._graphs + self.non_torch(self.profiled) + self._non_torch_of_serving(worst)
        return self.peak_in_use(worst) - tensors - others


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _left_behind(case: Measurement, *, is_first: bool) -> Iterator[Finding]:
    num_bytes = case.kept.allocated_bytes - case.before.allocated_bytes
    mask_bytes = MASK_SIZE * MASK_SIZE
    if is_first and num_bytes >= mask_bytes:
        yield Finding(subject=CAUSAL_MASK, when=case.case.name, num_bytes=mask_bytes, grade="exact", source=MEASURED)
        num_bytes -= mask_bytes
    if num_bytes > 0:
        yield Finding(subject=KEPT, when=case.case.name, num_bytes=num_bytes, grade="exact", source=MEASURED)


def _grown(case: Measurement, total: int) -> Iterator[Finding]:
    """Memory outside of torch that a case left in use, by owner as far as that is known."""
    by_subject: dict[str, list[LedgerRow]] = {}
    for row in case.grown:
        part, colon, _ = row.label.partition(":")
        by_subject.setdefault(f"{row.owner} {part}" if colon else row.owner, []).append(row)
    for subject, rows in by_subject.items():
        yield Finding(
            subject=subject,
            when=case.case.name,
            num_bytes=sum(row.num_bytes for row in rows),
            grade=max((row.grade for row in rows), key=GRADES.index),
            source="; ".join(dict.fromkeys(row.source for row in rows)),
        )
    unknown = total - sum(row.num_bytes for row in case.grown)
    if unknown > 0:
        yield Finding(
            subject=NON_TORCH_OF_SERVING, when=case.case.name, num_bytes=unknown, grade="exact", source=MEASURED
        )
