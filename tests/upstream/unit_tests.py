"""Runs vllm-ascend's own unit tests, of a checkout, on simulated devices.

They are those of its xlite package and of its worker, with the part that upstream runs on a card only.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.upstream.cases import RELEASES, ROOT

FOLDERS = ("tests/ut/xlite", "tests/ut/worker")
PATH = Path(__file__).parent / "path"


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


def release_of(checkout: Path) -> str:
    """The release of vllm that a checkout of vllm-ascend is tested with, if it is an installed one.

    Raises:
        ValueError: It is no checkout of vllm-ascend, or is tested with another release.
    """
    tag = checkout / ".github" / "vllm-release-tag.commit"
    if not tag.is_file():
        raise ValueError(f"{checkout} is no checkout of vllm-ascend: {tag.relative_to(checkout)} is missing")
    release = tag.read_text(encoding="utf-8").strip().removeprefix("v")
    if release not in RELEASES:
        raise ValueError(f"{checkout} is tested with vllm {release}: installed are {', '.join(RELEASES)}")
    return release


def run_unit_tests(environment: Path, checkout: Path, report: Path, folders: Sequence[str] = FOLDERS) -> UnitTests:
    """Run them with the checkout's own code.

    Args:
        environment: The folder that ``make_environment.sh`` made.
        checkout: Of vllm-ascend.
        report: File to write pytest's XML report to.
        folders: Folders of the checkout with the tests.

    Raises:
        ValueError: Nothing is installed that the checkout fits.
        RuntimeError: pytest did not get as far as running tests.
    """
    python, release = str(environment / "venv" / "bin" / "python"), release_of(checkout)
    # The checkout comes before this project: both have a package called tests.
    paths = (checkout, PATH, environment / release, ROOT)
    command = [python, "-W", "ignore", "-m", "npusim", "run", "--profile=a2-64g", "--num-devices=2", "--values=real"]
    without = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:npusim.pytest_plugin")
    pytest = [python, "-W", "ignore", "-m", "pytest", "-q", *without]
    run = subprocess.run(
        [*command, "--", *pytest, f"--junitxml={report}", *folders],
        cwd=checkout,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PATH": f"{PATH / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout[-4000:]}{run.stderr[-2000:]}")
    return _outcomes(ElementTree.parse(report).getroot(), run.stdout)


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
