"""The order of tests and the number of workers change neither an outcome nor what a simulated device does.

Runs the whole default suite once in each way: minutes, so it has a command of its own (docs/testing.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
AS_WRITTEN = ("-p", "no:randomly")
OTHER_WAYS = {
    "shuffled": ("-p", "randomly", "--randomly-seed=1"),
    "shuffled again": ("-p", "randomly", "--randomly-seed=2"),
    "two workers": ("-p", "randomly", "--randomly-seed=3", "-n", "2"),
}

Tests = dict[str, dict[str, Any]]


def run(folder: Path, *arguments: str) -> Tests:
    """What each test of the default suite came to, and the event logs that were made."""
    file = folder / "outcomes.json"
    outcomes = ("-p", "tests.outcomes", "--outcomes", str(file))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *outcomes, *arguments]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), shown.stdout[-2000:] + shown.stderr
    tests: Tests = json.loads(file.read_text())
    return tests


def all_event_logs(tests: Tests) -> set[str]:
    return {digest for test in tests.values() for digest in test["all_event_logs"]}


@pytest.fixture(scope="module")
def as_written(tmp_path_factory: pytest.TempPathFactory) -> Tests:
    tests = run(tmp_path_factory.mktemp("as_written"), *AS_WRITTEN)
    assert len(tests) > 2000
    assert sum(test["event_log"] is not None for test in tests.values()) > 500
    assert len(all_event_logs(tests)) > 400
    return tests


@pytest.mark.slow
@pytest.mark.sim_only("event logs are the simulated devices'")
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_any_order_and_any_number_of_workers(way, as_written, tmp_path):
    tests = run(tmp_path, *OTHER_WAYS[way])
    assert tests.keys() == as_written.keys()
    for figure in ("phases", "event_log"):
        different = {test: shown[figure] for test, shown in tests.items() if shown[figure] != as_written[test][figure]}
        assert different == {}, figure
    # Worlds that tests and fixtures make themselves. Which test made one may differ: what several look at runs once.
    strange = all_event_logs(tests) ^ all_event_logs(as_written)
    makers = {test for way in (tests, as_written) for test in way if strange & set(way[test]["all_event_logs"])}
    assert makers == set()
