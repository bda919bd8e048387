"""The command line. A composition root: it builds the simulated world, starts the runner in it, and reports.

This is the one module of xlite_runner that knows npusim.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from xlite_runner.config import ModelConfig, ProfilePolicy, RunnerConfig, check_and_update_config
from xlite_runner.errors import XliteRunnerError
from xlite_runner.flags import build_parser, overrides_from_flags
from xlite_runner.report import print_report, to_json
from xlite_runner.result import LedgerRow, ProfileResult
from xlite_runner.scenario import Scenario, load_scenario
from xlite_runner.stages import STAGES

if TYPE_CHECKING:
    from npusim.world import SimWorld

USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``xlite-runner`` and return its exit code: 0, or 2 when the scenario cannot be run."""
    options = build_parser().parse_args(arguments)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        scenario = load_scenario(options.scenario, overrides_from_flags(options))
        policies = tuple(ProfilePolicy) if options.command == "compare" else (scenario.profile_policy,)
        with _warnings_shown(errors):
            config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
        with _progress(errors, len(policies), shown=not options.no_progress) as advance:
            results = [start(scenario, config, policy, advance) for policy in policies]
    except Exception as error:
        if not _is_users(error):
            raise
        errors.print(f"xlite-runner: error: {error}", markup=False)
        for note in getattr(error, "__notes__", ()):
            errors.print(note, markup=False)
        return USAGE_ERROR
    if options.json:
        print(to_json(results, scenario.model_dump(mode="json")))
    else:
        print_report(results, Console(highlight=False, width=None if sys.stdout.isatty() else 160))
    return 0


def start(scenario: Scenario, config: RunnerConfig, policy: ProfilePolicy, advance: Any = None) -> ProfileResult:
    """Start the runner once, on a simulated world of the scenario's making.

    Args:
        scenario: Device, memory and other processes.
        config: The engine's configuration.
        policy: What the profile run executes in xlite full mode.
        advance: Called with the name of each stage as it begins.
    """
    import torch.distributed as dist

    world = build_world(scenario, config, policy)
    with world, _captured_log() as lines:
        from xlite_runner.engine import EngineCore  # imports torch_npu, which only now is the double

        engine = EngineCore(
            config, policy, world.run_ranks, dist.HashStore(), lambda stage: advance(policy.value, stage) if advance else None
        )
        engine.start()
        return engine.result(lines, ledgers(world), world.event_log.digest)


def build_world(scenario: Scenario, config: RunnerConfig, policy: ProfilePolicy) -> SimWorld:
    """The simulated devices that a scenario describes, one per rank."""
    from npusim import SimWorld
    from npusim.device.profile import load_profile

    profile = load_profile(scenario.device_profile)
    ranks = range(scenario.num_ranks)
    total = [scenario.total_memory_of(rank) for rank in ranks]
    free = [scenario.free_memory_of(rank, policy) for rank in ranks]
    others = [{process.name: process.memory_bytes for process in scenario.other_processes_of(rank)} for rank in ranks]
    return SimWorld(
        profile,
        num_devices=scenario.num_ranks,
        seed=config.seed,
        environment=config.environment,
        total_bytes=total,
        free_bytes=free,
        other_processes=others,
    )


def ledgers(world: SimWorld) -> list[list[LedgerRow]]:
    """Who owns each device's memory."""
    return [
        [
            LedgerRow(
                owner=entry.owner.value,
                label=entry.label,
                num_bytes=entry.num_bytes,
                grade=entry.grade.value,
                source=entry.source,
            )
            for entry in card.ledger.entries()
        ]
        for card in world.cards
    ]


def _is_users(error: Exception) -> bool:
    """Whether an error says what the user asked wrongly, rather than that this program is wrong."""
    if isinstance(error, (XliteRunnerError, AssertionError)):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    # ValueError and RuntimeError are upstream's classes for settings that cannot be served.
    return bool(names & {"NpusimError", "OutOfMemoryError"}) or type(error) in (ValueError, RuntimeError)


@contextmanager
def _captured_log() -> Iterator[list[str]]:
    """Collects what the engine and rank 0 log, as upstream's console shows it."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread().name in ("MainThread", "rank0"):
                lines.append(record.getMessage())

    with _handler(Collector(logging.INFO)):
        yield lines


@contextmanager
def _warnings_shown(errors: Console) -> Iterator[None]:
    """Shows warnings about settings, which are changed rather than refused."""

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.print(f"xlite-runner: {record.levelname.lower()}: {record.getMessage()}", markup=False)

    with _handler(Printer(logging.WARNING)):
        yield


@contextmanager
def _handler(handler: logging.Handler) -> Iterator[None]:
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
def _progress(console: Console, num_starts: int, *, shown: bool) -> Iterator[Any]:
    """A bar on stderr while it works; shows nothing where stderr is not a terminal."""
    if not shown or not console.is_terminal:
        with nullcontext():
            yield lambda policy, stage: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=num_starts * len(STAGES))

        def advance(policy: str, stage: str) -> None:
            progress.update(task, description=f"{policy}: {stage}", advance=1)

        yield advance
