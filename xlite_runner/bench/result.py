"""What a benchmark measured: one record per policy, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xlite_runner.bench.benchmark import BenchmarkRun
from xlite_runner.bench.metrics import BenchmarkMetrics
from xlite_runner.result import Grade, ProfileResult


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank's device while it served, in bytes.

    Attributes:
        capacity_bytes: Of the device.
        budget_bytes: What the engine may use of it.
        peak_bytes: The most in use at any moment.
        at_peak: Who held it then.
        peak_by_owner: The most that each owner held, at whatever moment.
        at_start: Who held what before the first request.
        at_end: Who holds what after the last one.
    """

    rank: int
    capacity_bytes: int
    budget_bytes: int
    peak_bytes: int
    at_peak: Mapping[str, int]
    peak_by_owner: Mapping[str, int]
    at_start: Mapping[str, int]
    at_end: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One engine under one workload.

    Attributes:
        profile: Its start-up.
        run: What became of the requests.
        metrics: Figures over all of them.
        memory: By rank; empty where nobody watched.
        time_grade: How far durations can be trusted.
        num_replayed_steps: Steps whose effect was taken over from a step of the same shape.
        event_log_digest: Identifies what the simulated world did.
    """

    profile: ProfileResult
    run: BenchmarkRun
    metrics: BenchmarkMetrics
    memory: tuple[RankMemory, ...] = ()
    time_grade: Grade = "assumed"
    num_replayed_steps: int = 0
    event_log_digest: str | None = None

    @property
    def policy(self) -> str:
        """The profile policy."""
        return self.profile.policy
