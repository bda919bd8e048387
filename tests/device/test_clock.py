"""Virtual time: hosts, clocks for engines, and what is planned."""

from __future__ import annotations

import re

import pytest

from npusim.device.clock import Agenda, Clock, HostClock
from npusim.errors import WorldError


def test_each_process_has_its_own_time():
    clock = Clock()
    clock.spend(1500)
    clock.process = 1
    assert clock.now_ns == 0
    clock.wait_until(700)
    clock.wait_until(600)
    assert clock.now_ns == 700
    clock.process = 0
    assert clock.now_ns == 1500
    assert clock.now == 1.5
    assert clock.of(1).now_ns == 700


def test_an_engine_starts_its_workers_and_waits_for_the_last():
    clock = Clock()
    clock.spend(100)
    clock.of(2).spend(1000)
    clock.start_together(3)
    assert [clock.of(process).now_ns for process in range(3)] == [100, 100, 1000]
    clock.of(1).spend(5000)
    clock.end_together(3)
    assert clock.now_ns == 5100
    assert clock.of(2).now_ns == 1000


def test_a_host_clock_counts_seconds_exactly():
    clock = Clock()
    host = HostClock(clock)
    for _ in range(1000):
        host.charge(0.001)
    assert host.now() == 1.0
    for target in (1.1, 1.1 + 1e-9, 2.3000000001):
        host.sleep_until(target)
        assert host.now() >= target
        assert host.now() - target < 2e-9
    host.sleep_until(0.5)
    assert clock.now_ns == 2300000001


@pytest.mark.parametrize("seconds", [-1e-9, float("nan"), float("inf")])
def test_impossible_times_are_refused(seconds):
    host = HostClock(Clock())
    with pytest.raises(ValueError, match="host_seconds must not be negative, got"):
        host.charge(seconds)
    if seconds >= 0 or seconds != seconds:
        with pytest.raises(WorldError, match="a process cannot sleep until"):
            host.sleep_until(seconds)


def test_what_is_planned_happens_in_order_when_somebody_looks():
    clock, seen = Clock(), []
    agenda = Agenda(clock)
    agenda.at(200, lambda: seen.append("late"))
    agenda.at(100, lambda: seen.append("first"))
    agenda.at(100, lambda: seen.append("second"))
    agenda.catch_up()
    assert seen == []
    assert agenda.next_ns == 100
    clock.spend(100)
    agenda.catch_up()
    assert seen == ["first", "second"]
    clock.spend(900)
    agenda.at(1000, lambda: seen.append("now"))
    agenda.catch_up()
    assert seen == ["first", "second", "late", "now"]
    with pytest.raises(WorldError, match=re.escape("cannot plan for 999 ns: it is 1000 ns already")):
        agenda.at(999, lambda: None)
