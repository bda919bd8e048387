"""Runs vllm-ascend's own unit tests, of a checkout, on simulated devices.

They are those of its xlite package and of its worker, with the part that upstream runs on a card only.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.upstream.cases import ROOT
from tests.upstream.environment import PATH, Environment, check_checkout, run

FOLDERS = ("tests/ut/xlite", "tests/ut/worker")
LEDGER = Path(__file__).with_name("unit_tests.toml")


def expected_failures() -> dict[str, str]:
    """Names of tests, each with the reason why it fails on the simulated device."""
    return dict(tomllib.loads(LEDGER.read_text(encoding="utf-8"))["fails"])


@dataclass(frozen=True)
class UnitTests:
    """Outcomes.

    Attributes:
        passed: Names of tests.
        skipped: Names of tests.
        failed: By name, the first line of what was wrong.
        output: What pytest printed.
    """

    passed: frozenset[str]
    skipped: frozenset[str]
    failed: dict[str, str]
    output: str


def run_unit_tests(environment: Environment, checkout: Path, report: Path, *, release: str | None = None) -> UnitTests:
    """Run them with the checkout's own code.

    Args:
        environment: Has the release of vllm.
        checkout: Of vllm-ascend.
        report: File to write pytest's XML report to.
        release: Of vllm; by default the one that the checkout says.

    Raises:
        UpstreamNotFoundError: Nothing is installed that the checkout fits.
        RuntimeError: pytest did not get as far as running tests.
        TimeoutError: It hangs.
    """
    check_checkout(checkout)
    python = str(environment.python)
    # The checkout comes before this project: both have a package called tests.
    paths = (checkout, PATH, environment.release(release or environment.release_for(checkout)), ROOT)
    command = [python, "-W", "ignore", "-m", "npusim", "run", "--profile=a2-64g", "--num-devices=2", "--values=real"]
    without = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:npusim.pytest_plugin")
    pytest = [python, "-W", "ignore", "-m", "pytest", "-q", *without]
    done = run(
        [*command, "--", *pytest, f"--junitxml={report}", *FOLDERS],
        paths,
        cwd=checkout,
        environment={"PATH": f"{PATH / 'bin'}{os.pathsep}{os.environ['PATH']}"},
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return _outcomes(ElementTree.parse(report).getroot(), done.stdout)


def _outcomes(report: ElementTree.Element, output: str) -> UnitTests:
    passed, skipped, failed = set(), set(), {}
    for case in report.iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        wrong = [child for kind in ("failure", "error") for child in case.findall(kind)]
        if wrong:
            failed[name] = (wrong[0].get("message") or "").partition("\n")[0]
        elif case.find("skipped") is not None:
            skipped.add(name)
        else:
            passed.add(name)
    return UnitTests(frozenset(passed - failed.keys()), frozenset(skipped), failed, output)
