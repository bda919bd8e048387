"""Runs vllm-ascend on simulated devices: a release of it, or a checkout that you work on.

    FOLDER/venv/bin/python -m tests.upstream start examples/tiny.toml --checkout PATH
    FOLDER/venv/bin/python -m tests.upstream unit-tests --checkout PATH

FOLDER is what tests/upstream/make_environment.sh made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.upstream.cases import ROOT
from tests.upstream.environment import PATH, Environment, UpstreamNotFoundError, check_checkout, package_alone, run
from tests.upstream.unit_tests import expected_failures, run_unit_tests
from xlite_runner.errors import ScenarioError
from xlite_runner.scenario import load_scenario

FIGURES = {
    "weights": "weights",
    "peak_activation": "peak activation",
    "non_torch": "non-torch memory",
    "available": "available for the KV cache",
    "kv_cache": "KV cache",
    "graph": "graphs",
}


def main() -> int:
    """Do what the command line says.

    Returns:
        0 if all is well, 1 if upstream's code failed, 2 if what was asked for cannot be run.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    starting = commands.add_parser("start", help="start one rank, serve prompts if there are any, print the memory")
    starting.set_defaults(do=start)
    starting.add_argument("scenario", type=Path, help="docs/scenario.md")
    starting.add_argument("--rank", type=int, default=0)
    starting.add_argument("--set", type=json.loads, default={}, help="scenario keys that replace the file's, as JSON")
    starting.add_argument("--prompts", type=int, nargs="+", default=[], metavar="LENGTH", help="three tokens each")
    starting.add_argument("--json", action="store_true", help="print everything as a line of JSON")
    testing = commands.add_parser("unit-tests", help="run the checkout's tests of xlite and of the worker")
    testing.set_defaults(do=unit_tests)
    for command in (starting, testing):
        command.add_argument("--checkout", type=Path, required=command is testing, help="of vllm-ascend")
        command.add_argument("--release", help="of vllm; default: the one that the checkout says, or else the newest")
    options = parser.parse_args()
    try:
        if options.checkout:
            check_checkout(options.checkout)
        return int(options.do(options, Environment.given()))
    except (UpstreamNotFoundError, ScenarioError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def start(options: argparse.Namespace, environment: Environment) -> int:
    """Start one rank, and print what it takes of the device."""
    num_ranks = load_scenario(options.scenario, options.set).num_ranks
    if not 0 <= options.rank < num_ranks:
        raise ScenarioError(f"--rank {options.rank}: allowed are 0 to {num_ranks - 1}")
    release = options.release or (
        environment.release_for(options.checkout) if options.checkout else environment.releases[-1]
    )
    folder = environment.release(release)
    command = (environment.python, "-W", "ignore", "-m", "tests.upstream.serving", options.scenario.resolve())
    settings = ("--rank", options.rank, "--set", json.dumps(options.set), "--prompts", *options.prompts)
    with package_alone(options.checkout) as package:
        done = run([*command, *map(str, settings)], (ROOT, PATH, *package, folder), stderr=None)
    if done.returncode:
        print(f"upstream's code ended with exit code {done.returncode}, see above", file=sys.stderr)
        return 1
    if options.json:
        print(done.stdout, end="")
    else:
        show(json.loads(done.stdout), f"vllm {release}, vllm-ascend {options.checkout or 'as released'}")
    return 0


def show(result: Mapping[str, Any], title: str) -> None:
    """Print a result as tables."""
    console = Console(highlight=False)
    started = result["start"]
    table = Table(title=f"{title}, rank {started['rank']}", title_justify="left")
    table.add_column("start-up")
    table.add_column("bytes", justify="right")
    for name, text in FIGURES.items():
        table.add_row(text, f"{started[name]:,}")
    console.print(table)
    if result["steps"]:
        table = Table("tokens by request")
        for text in ("peak, bytes", "kept, bytes"):
            table.add_column(text, justify="right")
        for step in result["steps"]:
            tokens = ", ".join(f"{request}: {num}" for request, num in step["num_scheduled_tokens"].items())
            table.add_row(tokens, f"{step['peak']:,}", f"{step['kept']:,}")
        console.print(table)
    for line in started["log_lines"]:
        if "KV cache size" in line or "Maximum concurrency" in line:
            console.print(line)


def unit_tests(options: argparse.Namespace, environment: Environment) -> int:
    """Run a checkout's own tests, and print which of them fail and are not known to."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = run_unit_tests(environment, options.checkout.resolve(), report, release=options.release)
    known = expected_failures()
    unexpected = {name: text for name, text in done.failed.items() if name not in known}
    if unexpected:
        print(done.output)
    for name in sorted(done.failed.keys() & known.keys()):
        print(f"fails as expected: {name}: {known[name]}")
    for name, text in sorted(unexpected.items()):
        print(f"fails: {name}: {text}")
    print(f"{len(done.passed)} passed, {len(done.failed)} failed, {len(done.skipped)} skipped")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
