"""Pytest plugin: ``-p tests.outcomes --outcomes FILE`` writes each test's outcome and the event logs that were made.

An event log belongs to whatever made it: a test, or a fixture that several tests share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npusim.device.event_log import EventLog

PROPERTY = "outcomes_event_logs"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Maker())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(config.option.outcomes))


class Maker:
    """Notes each event log that is made in this process, until its maker is done."""

    def __init__(self) -> None:
        self._made: list[EventLog] = []
        self._of_fixtures: list[str] = []
        self._make = EventLog.__init__

    def pytest_sessionstart(self) -> None:
        def make_and_note(log: EventLog, **settings: Any) -> None:
            self._make(log, **settings)
            self._made.append(log)

        EventLog.__init__ = make_and_note

    def pytest_sessionfinish(self) -> None:
        EventLog.__init__ = self._make

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        before, self._made = self._made, []
        try:
            return (yield)
        finally:
            if fixturedef.scope == "function":
                self._made = before + self._made
            else:
                self._of_fixtures += digests(self._made)
                self._made = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            item.user_properties.append((PROPERTY, [*digests(self._made), *self._of_fixtures]))
            self._made, self._of_fixtures = [], []


def digests(logs: list[EventLog]) -> list[str]:
    """Of those logs in which anything happened."""
    return [log.digest for log in logs if log.num_events]


class Writer:
    """Collects the reports, from all workers, and writes the file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"phases": {}})
        test["phases"][report.when] = report.outcome
        properties = dict(report.user_properties)
        test["event_log"] = properties.get("npusim_event_log")
        test["all_event_logs"] = properties.get(PROPERTY, [])

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._tests, indent=1, sort_keys=True))
