"""The engine's clock on a card."""

from __future__ import annotations

import pytest

from xlite_runner.serving.clock import Clock, WallClock


def test_the_wall_clock_runs_and_sleeps():
    clock: Clock = WallClock()
    begin = clock.now()
    clock.sleep_until(begin + 0.002)
    assert clock.now() >= begin + 0.002
    clock.sleep_until(begin)
    clock.charge(0.5)
    assert clock.now() < begin + 0.5


@pytest.mark.parametrize("seconds", [-1e-9, float("nan")])
def test_negative_work_is_refused(seconds):
    with pytest.raises(ValueError, match="host_seconds must not be negative"):
        WallClock().charge(seconds)
