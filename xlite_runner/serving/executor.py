"""Runs a step of the serving loop on an engine's workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from xlite_runner.serving.engine_core import ReplicaStep
from xlite_runner.serving.output import ModelRunnerOutput, SchedulerOutput


class Worker(Protocol):
    """What serving needs of a worker."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one step on this worker's device."""
        ...

    def execute_dummy_batch(self) -> None:
        """Take part in the collectives of a step that other replicas execute."""
        ...


class RunFunctions(Protocol):
    """Runs one function per worker, at the same time or in turns, and returns their results by worker."""

    def __call__(
        self, functions: Sequence[Callable[[], ModelRunnerOutput | None]]
    ) -> Sequence[ModelRunnerOutput | None]:
        """Run them; an error of any is raised."""
        ...


class WorkerExecutor:
    """All workers of one engine, replica by replica.

    Args:
        workers: By rank; those of a replica are neighbours.
        num_replicas: Data-parallel size.
        run_ranks: How they run.
    """

    def __init__(self, workers: Sequence[Worker], num_replicas: int, run_ranks: RunFunctions) -> None:
        if not workers or len(workers) % num_replicas:
            raise ValueError(f"{len(workers)} workers: allowed is a multiple of the {num_replicas} replicas")
        self._workers = workers
        self._replica_size = len(workers) // num_replicas
        self._run_ranks = run_ranks

    def execute_model(self, steps: Sequence[ReplicaStep]) -> list[ModelRunnerOutput | None]:
        """Execute a step of every replica; the result is that of a replica's first worker."""
        functions = [
            partial(_execute, worker, steps[rank // self._replica_size]) for rank, worker in enumerate(self._workers)
        ]
        return list(self._run_ranks(functions))[:: self._replica_size]


def _execute(worker: Worker, step: ReplicaStep) -> ModelRunnerOutput | None:
    result = None if step.scheduler_output is None else worker.execute_model(step.scheduler_output)
    if step.dummy_batch:
        worker.execute_dummy_batch()
    return result
