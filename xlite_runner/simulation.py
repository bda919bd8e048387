"""Starts the runner on a simulated world of a scenario's making: the composition root behind the command line.

This and :mod:`xlite_runner.cli` are the only modules of xlite_runner that know npusim.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from xlite_runner.audit.result import AuditResult
from xlite_runner.config import ProfilePolicy, RunnerConfig
from xlite_runner.result import LedgerRow, ProfileResult
from xlite_runner.scenario import Scenario
from xlite_runner.serving.clock import Clock, HostOverhead

if TYPE_CHECKING:
    from npusim.device.ledger import LedgerEntry
    from npusim.device.profile import DeviceProfile
    from npusim.hccl.rank_process import Store
    from npusim.torch_backend.values import Told
    from npusim.world import SimWorld
    from xlite_runner.engine import EngineCore


def start(
    scenario: Scenario,
    config: RunnerConfig,
    policy: ProfilePolicy,
    *,
    profile: DeviceProfile | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> ProfileResult:
    """Start the runner once and return what it measured.

    Args:
        scenario: Device, memory and other processes.
        config: The engine's configuration.
        policy: What the profile run executes in xlite full mode.
        profile: The devices' profile, if not the one that the scenario names.
        on_stage: Called with the name of each stage as it begins.

    Raises:
        ProfileError: The scenario's device profile does not exist.
        WorldError: The scenario's memory figures contradict each other.
        ValueError, AssertionError, torch.OutOfMemoryError: What the engine's start raises.
    """
    with started(scenario, config, policy, profile=profile, on_stage=on_stage) as (world, engine, lines):
        return engine.result(lines, ledgers(world), world.event_log.digest)


def audit(
    scenario: Scenario,
    config: RunnerConfig,
    policy: ProfilePolicy,
    *,
    on_stage: Callable[[str], None] | None = None,
) -> AuditResult:
    """Start the runner once, let it serve the worst cases that the configuration admits, and account for the memory.

    Args:
        scenario: Device, memory and other processes.
        config: The engine's configuration, with what the audit admits.
        policy: What the profile run executes in xlite full mode.
        on_stage: Called with the name of each stage as it begins, the last one is ``audit``.

    Raises:
        Exception: As :func:`start`. What goes wrong in serving is no error, but in the result.
    """
    with started(scenario, config, policy, on_stage=on_stage) as (world, engine, lines):
        profile = engine.result(lines, ledgers(world), world.event_log.digest)
        result = AuditResult(profile=profile, ranks=engine.audit(WorldLedger(world)))
    if not result.ran_out_of_memory:
        return result
    num_blocks = profile.num_gpu_blocks
    cache = replace(config.cache, num_gpu_blocks_override=num_blocks // 2)
    with started(scenario, replace(config, cache=cache), policy) as (world, engine, _):
        measured = engine.audit(WorldLedger(world), num_blocks)
    pairs = zip(result.ranks, measured, strict=True)
    return AuditResult(profile=profile, ranks=tuple(more.after_running_out_of_memory(first) for first, more in pairs))


@contextmanager
def started(
    scenario: Scenario,
    config: RunnerConfig,
    policy: ProfilePolicy,
    *,
    profile: DeviceProfile | None = None,
    told_values: Told | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> Iterator[tuple[SimWorld, EngineCore, list[str]]]:
    """A world, an engine started in it, and the lines of its log.

    Arguments and errors are those of :func:`start` and :func:`build_world`. What is sampled follows by default from the
    engine's seed.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not by name

    from npusim.told import ToldTokens

    told_values = told_values or ToldTokens(config.model.vocab_size, config.seed)
    world = build_world(scenario, config, policy, profile, told_values=told_values)
    with world, captured_log() as lines:
        from xlite_runner.engine import EngineCore  # imports torch_npu, which only now is the double

        with _imports_out_of_the_collectors_way():
            engine = EngineCore(config, policy, world.run_ranks, HashStore(), on_stage)
            engine.start()
            yield world, engine, lines


class WorldLedger:
    """The ledgers of a simulated world, as an audit looks at them."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world

    def outside_torch(self, rank: int) -> list[LedgerRow]:  # noqa: D102 - inherited
        rows = map(_row, self._world.cards[rank].ledger.holdings())
        return [row for row in rows if row.owner != "torch segment"]

    def peak(self, rank: int) -> list[LedgerRow]:  # noqa: D102 - inherited
        return [_row(entry) for entry in self._world.cards[rank].ledger.peak_holdings()]

    def reset_peak(self, rank: int) -> None:  # noqa: D102 - inherited
        self._world.cards[rank].ledger.reset_peak()


def build_world(
    scenario: Scenario,
    config: RunnerConfig,
    policy: ProfilePolicy,
    profile: DeviceProfile | None = None,
    *,
    lone_rank: int | None = None,
    store: Store | None = None,
    told_values: Told | None = None,
    values: Literal["shape", "real"] = "shape",
) -> SimWorld:
    """The simulated devices that a scenario describes, one per rank.

    Args:
        scenario: Device, memory and other processes.
        config: The engine's configuration.
        policy: What the profile run executes in xlite full mode.
        profile: The devices' profile, if not the one that the scenario names.
        lone_rank: The only rank that will run.
        store: Of ``torch.distributed``: the other ranks are processes of their own that share it.
        told_values: Says what was sampled; a started engine cannot serve without, since nobody computes logits.
        values: As for :class:`npusim.SimWorld`.
    """
    from npusim.device.cost import ENGINE
    from npusim.device.profile import load_profile
    from npusim.world import SimWorld

    ranks = range(scenario.num_ranks)
    return SimWorld(
        load_profile(scenario.device_profile) if profile is None else profile,
        num_devices=scenario.num_ranks,
        seed=config.seed,
        environment=config.environment,
        total_bytes=[scenario.total_memory_of(rank) for rank in ranks],
        free_bytes=[scenario.free_memory_of(rank, policy) for rank in ranks],
        other_processes=[
            {process.name: process.memory_bytes for process in scenario.other_processes_of(rank)} for rank in ranks
        ],
        lone_rank=lone_rank,
        store=store,
        told_values=told_values,
        host_costs=ENGINE,
        values=values,
    )


def engine_clock(world: SimWorld) -> Clock:
    """The world's virtual time for an engine that runs in it; on a worker's rank it is that rank's."""
    return world.host_clock()


def host_overhead(world: SimWorld) -> HostOverhead:
    """What an engine in this world has to charge for its own work. Grade: calibrated, docs/time.md."""
    costs = world.cards[0].host_costs
    return HostOverhead(costs.step_ns / 1e9, costs.request_ns / 1e9)


def ledgers(world: SimWorld) -> list[list[LedgerRow]]:
    """Who owns each device's memory."""
    return [[_row(entry) for entry in card.ledger.entries()] for card in world.cards]


def _row(entry: LedgerEntry) -> LedgerRow:
    return LedgerRow(
        owner=entry.owner.value,
        label=entry.label,
        num_bytes=entry.num_bytes,
        grade=entry.grade.value,
        source=entry.source,
    )


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collects what the engine and rank 0 log, as upstream's console shows it."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread().name in ("MainThread", "rank0"):
                lines.append(record.getMessage())

    with handling(Collector(logging.INFO)):
        yield lines


@contextmanager
def handling(handler: logging.Handler) -> Iterator[None]:
    """Shows xlite_runner's log to a handler, too."""
    logger = logging.getLogger("xlite_runner")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def _imports_out_of_the_collectors_way() -> Iterator[None]:
    """The start-up collects garbage at a dozen points, each time through everything that torch's import left."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
