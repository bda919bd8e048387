"""The order of tests and the number of workers change neither results nor what simulated devices do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ("tests/vendor", "tests/hccl", "tests/runner/test_graphs.py", "tests/runner/test_either_device.py")
WAYS = {
    "as written": ("-p", "no:randomly"),
    "shuffled": ("-p", "randomly", "--randomly-seed=1"),
    "shuffled again": ("-p", "randomly", "--randomly-seed=2"),
    "two workers": ("-p", "randomly", "--randomly-seed=3", "-n", "2"),
}


@pytest.mark.slow
@pytest.mark.sim_only("event logs are the simulated devices'")
def test_any_order_and_any_number_of_workers():
    def outcome(arguments: tuple[str, ...]) -> tuple[str, ...]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *TESTS]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
        assert re.search(r"^\d+ passed", shown, re.MULTILINE), shown[-2000:]
        return tuple(
            re.findall(r"^(\d+ passed|shared tests: .*|event logs: \d+, together [0-9a-f]+)", shown, re.MULTILINE)
        )

    outcomes = {way: outcome(arguments) for way, arguments in WAYS.items()}
    assert set(outcomes.values()) == {outcomes["as written"]}
    assert len(outcomes["as written"]) == 3
