"""``tests.outcomes``, with which ``tests/test_order.py`` compares runs: it would show a difference."""

from __future__ import annotations

import json

import pytest

from npusim.device.event_log import EventLog

PROGRAM = """
from npusim.device.event_log import EventLog
import pytest

def log(word):
    made = EventLog()
    made.record(word)

@pytest.fixture(scope="module")
def shared():
    log("shared")

def test_one(shared, npu_world):
    log("one")

def test_two(shared):
    EventLog()  # in which nothing happens

def test_three():
    log("three")
    raise AssertionError
"""


def digest(word: str) -> str:
    log = EventLog()
    log.record(word)
    return log.digest


@pytest.mark.sim_only("event logs are the simulated devices'")
def test_each_outcome_and_each_event_log_is_noted(run, pytester):
    make = EventLog.__init__
    run(PROGRAM, "-p", "tests.outcomes", "--outcomes=out.json").assert_outcomes(passed=2, failed=1)
    assert EventLog.__init__ is make, "what the session changed ends with it"
    tests = json.loads((pytester.path / "out.json").read_text())
    noted = {name.partition("::")[2]: test for name, test in tests.items()}
    assert {name: test["phases"]["call"] for name, test in noted.items()} == {
        "test_one": "passed", "test_two": "passed", "test_three": "failed"
    }  # fmt: skip
    assert {digest("one"), digest("shared"), noted["test_one"]["event_log"]} == {*noted["test_one"]["all_event_logs"]}
    assert noted["test_two"]["all_event_logs"] == []
    assert noted["test_three"]["all_event_logs"] == [digest("three")]
