"""The command line: reads a scenario and flags, starts the runner once per policy, reports."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from xlite_runner.audit.report import audit_json, print_audit
from xlite_runner.audit.result import AuditResult
from xlite_runner.bench.report import bench_to_json, print_bench_report
from xlite_runner.bench.simulation import check_plot, draw, serve
from xlite_runner.config import ModelConfig, ProfilePolicy, RunnerConfig, check_and_update_config
from xlite_runner.errors import OutputError, XliteRunnerError
from xlite_runner.flags import build_parser, overrides_from_flags
from xlite_runner.report import print_report, to_json
from xlite_runner.result import ProfileResult
from xlite_runner.scenario import Scenario, load_scenario
from xlite_runner.simulation import audit, handling, start
from xlite_runner.stages import STAGES

BEFORE_AND_AFTER = (ProfilePolicy.RUNNABLE, ProfilePolicy.SKIP)
UNSAFE = 1
REQUESTS_FAILED = 1
USAGE_ERROR = 2
WIDTH_WITHOUT_TERMINAL = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``xlite-runner`` and return its exit code.

    It is 0, 1 when a benchmark's requests did not all end with a result or an audit finds that serving takes more than
    was reserved, or 2 when the scenario cannot be run or its result cannot be written.
    """
    options = build_parser().parse_args(arguments)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        scenario = load_scenario(options.scenario, overrides_from_flags(options))
        policies = _policies(options, scenario)
        with _warnings_shown(errors):
            config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
        if options.command == "bench":
            return _bench(options, scenario, config, errors)
        with _progress(errors, len(policies), shown=not options.no_progress) as advance:
            if options.command == "audit":
                (policy,) = policies
                report = partial(_report_audit, audit(scenario, config, policy, on_stage=advance(policy.value)))
            else:
                results = [start(scenario, config, policy, on_stage=advance(policy.value)) for policy in policies]
                report = partial(_report, results)
        with _writing_output():
            return report(scenario, as_json=options.json)
    except Exception as error:
        if not _is_users(error):
            raise
        for line in (f"xlite-runner: error: {error}", *getattr(error, "__notes__", ())):
            errors.print(line, markup=False)
        return USAGE_ERROR


def _policies(options: Namespace, scenario: Scenario) -> tuple[ProfilePolicy, ...]:
    if options.command != "compare":
        return (scenario.profile_policy,)
    return (*BEFORE_AND_AFTER, ProfilePolicy.AUDITED) if options.audited else BEFORE_AND_AFTER


def _report(results: Sequence[ProfileResult], scenario: Scenario, *, as_json: bool) -> int:
    if as_json:
        print(to_json(results, scenario.model_dump(mode="json")))
    else:
        print_report(results, _output())
    return 0


def _bench(options: Namespace, scenario: Scenario, config: RunnerConfig, errors: Console) -> int:
    if options.plot is not None:
        check_plot(options.plot)
    policies: tuple[ProfilePolicy, ...] = (scenario.profile_policy,)
    if options.compare is not None:
        policies = tuple(map(ProfilePolicy, options.compare)) or tuple(ProfilePolicy)
    served = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = errors.is_terminal and not options.no_progress
    with Progress(*columns, console=errors, transient=True, disable=not shown) as progress:
        for policy in policies:
            told = _BenchProgress(progress, policy.value)
            served.append(serve(scenario, config, policy, on_stage=told.stage, on_requests=told.requests))
    if options.plot is not None:
        draw(options.plot, scenario, served)
    results = [each.result for each in served]
    with _writing_output():
        if options.json:
            settings = scenario.model_dump(mode="json")
            print(bench_to_json(results, settings, detailed=scenario.bench.save_detailed), end="")
        else:
            print_bench_report(results, _output())
    return REQUESTS_FAILED if any(result.metrics.failed for result in results) else 0


def _report_audit(result: AuditResult, scenario: Scenario, *, as_json: bool) -> int:
    if as_json:
        print(audit_json([result], scenario.model_dump(mode="json")))
    else:
        print_audit(result, _output())
    return 0 if result.is_safe else UNSAFE


def _output() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


@contextmanager
def _writing_output() -> Iterator[None]:
    """Makes an error of its own of standard output that takes nothing: a full disk, a reader that has gone."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):  # what is left in the buffer would fail once more at the end of the process
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        raise OutputError(f"cannot write the result: {error.strerror}") from None


def _is_users(error: Exception) -> bool:
    """Whether an error says what the user asked wrongly, rather than that this program is wrong."""
    if isinstance(error, (XliteRunnerError, AssertionError)):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    # ValueError and RuntimeError are upstream's classes for settings that cannot be served.
    return bool(names & {"NpusimError", "OutOfMemoryError"}) or type(error) in (ValueError, RuntimeError)


@contextmanager
def _warnings_shown(errors: Console) -> Iterator[None]:
    """Shows warnings about settings, which are changed rather than refused."""

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.print(f"xlite-runner: {record.levelname.lower()}: {record.getMessage()}", markup=False)

    with handling(Printer(logging.WARNING)):
        yield


class _BenchProgress:
    """One bar on stderr for each policy: its start-up, then the requests that have ended."""

    def __init__(self, progress: Progress, policy: str) -> None:
        self._progress = progress
        self._policy = policy
        self._task = progress.add_task(policy, total=None)
        self._num_ended = -1

    def stage(self, name: str) -> None:
        self._progress.update(self._task, description=f"{self._policy}: {name}")

    def requests(self, num_ended: int, num_requests: int) -> None:
        if num_ended != self._num_ended:
            self._num_ended = num_ended
            self._progress.update(
                self._task, description=f"{self._policy}: serving", completed=num_ended, total=num_requests
            )


@contextmanager
def _progress(
    console: Console, num_starts: int, *, shown: bool
) -> Iterator[Callable[[str], Callable[[str], None] | None]]:
    """A bar on stderr while it works; shows nothing where stderr is not a terminal.

    Yields what gives, for a start's name, what is to be told of its stages.
    """
    if not shown or not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=num_starts * len(STAGES))
        yield lambda name: lambda stage: progress.update(task, description=f"{name}: {stage}", advance=1)
