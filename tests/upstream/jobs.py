"""Does many things with upstream's code, each in a process of its own that begins with upstream's imports.

Run as a script inside an environment that has vllm and vllm-ascend; prints a line of JSON for each::

    python -m tests.upstream.jobs start           # every start-up of tests/upstream/cases.py
    python -m tests.upstream.jobs serve 'top-p'   # one of the serving cases
    python -m tests.upstream.jobs random 10 11 12 # the random cases of some seeds
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from npusim.world import SimWorld
from tests.upstream.cases import (
    AUDITS,
    CASES,
    MORE_AUDITS,
    NO_DRAFTS,
    RANKS,
    REFUSED,
    SERVED_BY_RANKS,
    SERVING,
    Case,
)
from tests.upstream.engine import import_upstream, start
from tests.upstream.random_cases import SEEDS, random_case
from tests.upstream.ranks import end_with_parent, in_processes
from tests.upstream.serving import serve_case
from xlite_runner.scenario import Scenario, load_scenario


@dataclass(frozen=True)
class Job:
    """Something to do with upstream's code.

    Attributes:
        name: Of its case.
        profile: Kind of device; jobs on one kind share the imports, which upstream does differently for each.
        work: Does it; returns what goes into its line.
    """

    name: str
    profile: str
    work: Callable[[], dict[str, Any]]


def job(case: Case, work: Callable[..., Any]) -> Job:
    """What a case asks for: on one rank, or on all, each in a process of its own, whose results are in ``ranks``.

    Args:
        case: Says which.
        work: Called with the scenario, the rank and where it finds the others; returns a dataclass.
    """
    scenario = load_scenario(case.scenario, case.settings)

    def on_one() -> dict[str, Any]:
        return asdict(work(scenario, case.rank))

    def on_all() -> dict[str, Any]:
        results = in_processes(scenario.num_ranks, partial(work, scenario))
        return {"ranks": [asdict(result) for result in results]}

    return Job(case.name, scenario.device_profile, on_all if case.all_ranks else on_one)


def start_ups(release: str, names: Sequence[str]) -> Iterator[Job]:
    """The start-ups on a release, refused ones at the end."""
    for case in (*CASES, *RANKS, *REFUSED.values(), NO_DRAFTS):
        if case.runs_on(release) and (not names or case.name in names):
            yield job(case, start)


def servings(release: str, names: Sequence[str]) -> Iterator[Job]:
    """The serving cases on a release."""
    for case in (*SERVING, *SERVED_BY_RANKS):
        if case.runs_on(release) and (not names or case.name in names):
            yield job(case, partial(serve_case, case))


def random_jobs(release: str, seeds: Sequence[str]) -> Iterator[Job]:
    """The random cases of some seeds, by default those of every day."""
    seeds = seeds or list(map(str, SEEDS))
    with tempfile.TemporaryDirectory() as folder:
        cases = [random_case(int(seed), Path(folder)) for seed in seeds]
    for seed, case in zip(seeds, cases, strict=True):
        yield Job(case.name, case.settings["device_profile"], partial(serve_random, int(seed)))


def serve_random(seed: int) -> dict[str, Any]:
    """Start and serve the random case of a seed."""
    with tempfile.TemporaryDirectory(prefix="models") as folder:
        case = random_case(seed, Path(folder))
        return asdict(serve_case(case, load_scenario(case.scenario, case.settings)))


def audits(cases: Iterable[Case], release: str, names: Sequence[str]) -> Iterator[Job]:
    """The audits on a release."""

    def audited(scenario: Scenario, rank: int) -> dict[str, Any]:
        with SimWorld(scenario.device_profile, environment={}):
            from tests.upstream.audit import audit_upstream
        return asdict(audit_upstream(scenario, rank))

    for case in cases:
        if case.runs_on(release) and (not names or case.name in names):
            scenario = load_scenario(case.scenario, case.settings)
            yield Job(case.name, scenario.device_profile, partial(audited, scenario, case.rank))


KINDS = {
    "start": start_ups,
    "serve": servings,
    "random": random_jobs,
    "audit": partial(audits, AUDITS),
    "more_audits": partial(audits, MORE_AUDITS),
}


JOB_LIMIT_S = 900
"""No job takes nearly that long; one that hangs ends then."""


def in_child(work: Callable[[], None], limit_s: float = 0) -> int:
    """Do something in a process of its own that begins with this one's imports.

    Args:
        work: What to do.
        limit_s: Seconds after which a signal ends the process; 0 for no limit.

    Returns:
        How it ended: 0, 1 after an error, which is printed, or minus the number of the signal that ended it.
    """
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            end_with_parent(parent)
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - nothing may get past the fork
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def do(jobs: Iterable[Job], results: TextIO) -> None:
    """Do each job and write its result, or its error, as a line of JSON."""

    def do_one(job: Job) -> None:
        try:
            answer = job.work()
        except BaseException as error:  # noqa: BLE001 - whoever reads the line reports it
            answer = {"error": traceback.format_exc(), "type": type(error).__name__, "text": str(error)}
        print(json.dumps({"case": job.name, **answer}), file=results, flush=True)

    def do_all(profile: str, some: list[Job]) -> None:
        import_upstream(profile)
        for job in some:
            if code := in_child(partial(do_one, job), JOB_LIMIT_S):
                error = f"the job's process ended with {signal.Signals(-code).name if code < 0 else code}"
                print(json.dumps({"case": job.name, "error": error}), file=results, flush=True)

    by_profile: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        by_profile[job.profile].append(job)
    for profile, some in by_profile.items():
        if code := in_child(partial(do_all, profile, some)):
            sys.exit(f"importing upstream ended with {code}")


def main() -> None:
    """Do one kind of jobs and print the results."""
    from importlib.metadata import version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("names", nargs="*", help="of cases, default: all; of random ones the seeds")
    options = parser.parse_args()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # upstream logs to stdout
    release = version("vllm").removesuffix("+empty")
    do(KINDS[options.kind](release, options.names), results)


if __name__ == "__main__":
    main()
