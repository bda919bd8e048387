"""Serves a scenario's workload on a simulated world: the composition root behind ``xlite-runner bench``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xlite_runner.bench.benchmark import Benchmark, StepLoad
from xlite_runner.bench.faults import Fault
from xlite_runner.bench.metrics import calculate_metrics
from xlite_runner.bench.result import BenchResult, RankMemory
from xlite_runner.bench.workload import TimedRequest, build_requests
from xlite_runner.config import ProfilePolicy, RunnerConfig
from xlite_runner.errors import OutputError, WorkloadError
from xlite_runner.scenario import Scenario
from xlite_runner.serving.engine_core import Executor, ServingEngine
from xlite_runner.serving.executor import WorkerExecutor
from xlite_runner.simulation import engine_clock, host_overhead, ledgers, started

if TYPE_CHECKING:
    from npusim.report.panels import Panel
    from npusim.told import ToldTokens
    from npusim.world import SimWorld
    from xlite_runner.engine import EngineCore
    from xlite_runner.worker import NPUWorker

PLOT_SUFFIXES = (".html", ".png")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A benchmark's result, and what a picture of it shows."""

    result: BenchResult
    panel: Panel


def serve(
    scenario: Scenario,
    config: RunnerConfig,
    policy: ProfilePolicy,
    *,
    replays: bool = True,
    on_stage: Callable[[str], None] | None = None,
    on_requests: Callable[[int, int], None] | None = None,
) -> Served:
    """Start the runner once, serve the scenario's workload, and return what was measured.

    Args:
        scenario: Device, memory, other processes, workload.
        config: The engine's configuration.
        policy: What the profile run executes in xlite full mode.
        replays: Execute one step of each shape and repeat what it did, where that gives the same; otherwise all.
        on_stage: Called with the name of each stage of the start-up as it begins.
        on_requests: Called with the numbers of requests that have ended and of all requests, after each step.

    Raises:
        WorkloadError: The workload cannot be read, or none of its requests can be served.
        ProfileError: The scenario's device profile does not exist.
        WorldError: The scenario's memory figures contradict each other.
        ValueError: The sampling asks for more than the vocabulary has.
        ValueError, AssertionError, torch.OutOfMemoryError: What the engine's start raises.
    """
    from npusim.told import ToldTokens

    workload = scenario.workload
    requests = build_requests(workload)
    _check_lengths(requests, config)
    workload.sampling.verify(config.model.vocab_size)
    told = ToldTokens(config.model.vocab_size, workload.seed, workload.draft_acceptance_rate)
    with started(scenario, config, policy, told_values=told, on_stage=on_stage) as (world, engine, lines):
        watch = _Watch(world, engine, len(requests), on_requests)
        executor = _executor(engine, world, told, replays=replays)
        _plan(scenario.faults, world)
        run = _benchmark(scenario, engine, executor, world, watch).run(requests)
        options = scenario.bench
        metrics = calculate_metrics(run.records, run.duration, options.goodput, options.metric_percentiles)
        result = BenchResult(
            profile=engine.result(lines, ledgers(world), world.event_log.digest),
            run=run,
            metrics=metrics,
            memory=watch.memory(),
            num_replayed_steps=getattr(executor, "num_replayed_steps", 0),
            event_log_digest=world.event_log.digest,
        )
        return Served(result=result, panel=watch.panel(result))


def draw(path: Path, scenario: Scenario, served: Sequence[Served]) -> None:
    """Draw memory and load of rank 0 over time, one panel per policy.

    The file appears as a whole or not at all.

    Args:
        path: Its suffix, ``.html`` or ``.png``, decides the format.
        scenario: What was served.
        served: Under each policy.

    Raises:
        MissingPackageError: A PNG without matplotlib.
        OutputError: The file cannot be written.
    """
    from npusim.report.html import write_html
    from npusim.report.png import write_png

    write = {".html": write_html, ".png": write_png}[path.suffix.lower()]
    title = f"{scenario.model.stem} on {scenario.num_ranks} x {scenario.device_profile}: memory of rank 0 while serving"
    unfinished = path.with_name(f".unfinished-{os.getpid()}{path.suffix}")
    try:
        write(unfinished, title, [each.panel for each in served])
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OutputError(f"--plot {path}: cannot be written: {error.strerror}") from None


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before anything is computed.

    Raises:
        WorkloadError: The suffix is unknown, the folder does not exist, or nothing can be written there.
        MissingPackageError: A PNG without matplotlib.
    """
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise WorkloadError(f"--plot {path}: allowed are files that end in {' or '.join(PLOT_SUFFIXES)}")
    try:
        if not path.parent.is_dir():
            raise WorkloadError(f"--plot {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise WorkloadError(f"--plot {path}: is a folder; allowed is a file")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise WorkloadError(f"--plot {path}: cannot be written: {error.strerror}") from None
    if path.suffix.lower() == ".png":
        from npusim.report.png import import_figure

        import_figure()


def _check_lengths(requests: Sequence[TimedRequest], config: RunnerConfig) -> None:
    max_model_len = config.scheduler.max_model_len
    lengths = [request.sample.prompt_len + request.sampling_params.max_tokens for request in requests]
    if min(lengths) > max_model_len:
        raise WorkloadError(
            f"no request of the workload can be served: the shortest has {min(lengths)} tokens, prompt and output "
            f"together; allowed is at most max_model_len = {max_model_len}"
        )


def _plan(faults: Sequence[Fault], world: SimWorld) -> None:
    """Let faults happen at their times from now on."""
    from npusim.device.clock import NS_PER_S
    from npusim.device.faults import OtherProcess

    for fault in faults:
        card = world.cards[fault.rank]
        at_ns = world.clock.now_ns + round(fault.at * NS_PER_S)
        if fault.other_process_bytes:
            other = card.other_processes.setdefault("fault", OtherProcess(card.ledger, "fault"))
            card.agenda.at(at_ns, partial(other.grow, fault.other_process_bytes))
        if fault.slowdown is not None:
            card.agenda.at(at_ns, partial(card.slow_down, fault.slowdown))
        if fault.collective_delay:
            card.agenda.at(at_ns, partial(card.delay_next_collective, round(fault.collective_delay * NS_PER_S)))


def _executor(engine: EngineCore, world: SimWorld, told: ToldTokens, *, replays: bool) -> Executor:
    config = engine.config
    num_replicas = config.parallel.num_replicas
    if not replays or num_replicas > 1 or config.speculative is not None or config.scheduler.async_scheduling:
        return WorkerExecutor(engine.workers, num_replicas, world.run_ranks)

    from npusim.step_recorder import StepRecorder
    from xlite_runner.bench.replay import ReplayingExecutor

    def tokens(rank: int, num_requests: int) -> list[int]:
        sampled: list[int] = told.tokens(rank, (num_requests, 1))[:, 0].tolist()
        return sampled

    recorder = StepRecorder(world, len(engine.workers))
    return ReplayingExecutor(engine.workers, world.run_ranks, recorder, tokens)


def _benchmark(scenario: Scenario, engine: EngineCore, executor: Executor, world: SimWorld, watch: _Watch) -> Benchmark:
    import torch

    from npusim.errors import NpusimError

    config = engine.config
    return Benchmark(
        ServingEngine.from_config(config, engine.num_gpu_blocks, executor),
        engine_clock(world),
        vocab_size=config.model.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        max_concurrency=scenario.workload.max_concurrency,
        # What torch_npu raises, for memory and for collectives; npusim's own errors say that the simulation is wrong.
        is_engine_error=lambda error: (
            isinstance(error, (torch.OutOfMemoryError, RuntimeError)) and not isinstance(error, NpusimError)
        ),
        host_overhead=host_overhead(world),
        survives_errors=scenario.bench.survives_errors,
        observers=[watch],
    )


class _Watch:
    """Watches memory and load after each step.

    Args:
        world: Whose devices.
        engine: Started.
        num_requests: Of the workload.
        on_requests: Told how many of them have ended.
    """

    def __init__(
        self,
        world: SimWorld,
        engine: EngineCore,
        num_requests: int,
        on_requests: Callable[[int, int], None] | None,
    ) -> None:
        from npusim.report.memory import MemoryWatch
        from npusim.report.panels import LOAD_COLORS
        from npusim.report.timeline import Timeline

        self._world = world
        self._engine = engine
        self._num_requests = num_requests
        self._on_requests = on_requests
        self._ranks_per_replica = len(engine.workers) // engine.config.parallel.num_replicas
        self._states = tuple(LOAD_COLORS)
        self._load = Timeline()
        self._end = 0.0
        self._memory = [
            MemoryWatch(world.cards[worker.rank], world.runtimes[worker.rank].allocator, self._tensors(worker, 0.0))
            for worker in engine.workers
        ]
        self._at_start = [watch.now() for watch in self._memory]

    def on_step(self, begin: float, end: float, load: StepLoad) -> None:
        """See :class:`xlite_runner.bench.benchmark.Observer`."""
        for card in self._world.cards:
            card.agenda.catch_up()
        # Steps are part of what the world did, also those whose operators leave no other trace in its log.
        self._world.event_log.record("step", self._world.clock.now_ns, load.num_tokens, load.num_running)
        self._end = end
        self._load.add(begin, dict(zip(self._states, (load.num_running, load.num_waiting), strict=True)))
        for worker, watch in zip(self._engine.workers, self._memory, strict=True):
            usage = load.kv_cache_usages[worker.rank // self._ranks_per_replica]
            watch.end_interval(begin, end, self._tensors(worker, usage))
        if self._on_requests is not None:
            self._on_requests(load.num_finished, self._num_requests)

    def memory(self) -> tuple[RankMemory, ...]:
        """What was seen, by rank."""
        memories = []
        for worker, watch, at_start in zip(self._engine.workers, self._memory, self._at_start, strict=True):
            peak = watch.timeline.peak_sample
            at_peak = peak.values if peak is not None else at_start
            memories.append(
                RankMemory(
                    rank=worker.rank,
                    capacity_bytes=worker.memory.init_snapshot.total_memory,
                    budget_bytes=int(worker.memory.requested),
                    peak_bytes=sum(at_peak.values()),
                    at_peak=at_peak,
                    peak_by_owner=watch.timeline.peaks,
                    at_start=at_start,
                    at_end=watch.now(),
                )
            )
        return tuple(memories)

    def panel(self, result: BenchResult) -> Panel:
        """The picture of rank 0."""
        from npusim.report.panels import Panel

        memory, load = result.memory[0], result.run.load
        return Panel(
            title=f"{result.policy}: {result.profile.num_gpu_blocks:,} blocks, at most {load.max_num_running} running, "
            f"{result.metrics.output_throughput:,.0f} tok/s",
            memory=self._memory[0].timeline.samples(),
            load=self._load.samples(),
            end=self._end,
            capacity_bytes=memory.capacity_bytes,
            budget_bytes=memory.budget_bytes,
        )

    def _tensors(self, worker: NPUWorker, usage: float) -> dict[str, int]:
        from npusim.report.panels import KV_CACHE_FREE, KV_CACHE_IN_USE, WEIGHTS

        num_blocks = self._engine.kv_cache_configs[worker.rank].num_blocks
        block_bytes = worker.kv_cache_bytes // num_blocks
        in_use = round(usage * (num_blocks - 1)) * block_bytes
        return {
            WEIGHTS: worker.model_runner.model_memory_usage,
            KV_CACHE_IN_USE: in_use,
            KV_CACHE_FREE: worker.kv_cache_bytes - in_use,
        }
