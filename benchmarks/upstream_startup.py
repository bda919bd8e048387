"""Time and host memory of a start-up by upstream's own code on each installed release, in a new process.

FOLDER/venv/bin/python benchmarks/upstream_startup.py [SCENARIO]   (FOLDER: docs/upstream.md)

The first of the runs, which compiles modules and fills the page cache, does not count; of the others the median does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from tests.upstream.cases import ROOT, SEED
from tests.upstream.environment import PATH, Environment
from xlite_runner.scenario import load_scenario


def measure(environment: Environment, release: str, arguments: tuple[str | Path, ...]) -> tuple[float, float, float]:
    """Seconds by the clock, seconds of CPU and MiB of host memory of one start-up and its child processes."""
    paths = (ROOT, PATH, environment.release(release))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    begin = time.perf_counter()
    process = subprocess.Popen(
        [environment.python, "-W", "ignore", *arguments],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status:
        raise RuntimeError(f"{arguments} with release {release} ended with {os.waitstatus_to_exitcode(status)}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="?", type=Path, default=SEED)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    environment = Environment.given()
    table = Table("vllm", title=f"start-up of {options.scenario.stem}")
    for column in ("", "s", "s of CPU", "MiB"):
        table.add_column(column, justify="right")
    profile = load_scenario(options.scenario).device_profile
    steps = {
        "imports": ("-c", f"from tests.upstream import engine; engine.import_upstream({profile!r})"),
        "all": ("-m", "tests.upstream.engine", options.scenario.resolve()),
    }
    for release in environment.releases:
        for name, arguments in steps.items():
            runs = [measure(environment, release, arguments) for _ in range(1 + options.runs)][1:]
            seconds, cpu, mib = (median(run[i] for run in runs) for i in range(3))
            table.add_row(release, name, f"{seconds:.1f}", f"{cpu:.1f}", f"{mib:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
