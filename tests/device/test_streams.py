"""Streams and events of a device in virtual time."""

from __future__ import annotations

import pytest

from npusim.device.clock import Clock
from npusim.device.streams import Streams
from npusim.errors import WorldError


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def streams(clock):
    return Streams(clock)


def test_handles_count_up_from_the_default_stream(streams):
    assert streams.default_stream == 1
    assert [streams.create() for _ in range(3)] == [2, 3, 4]
    assert Streams(Clock(), first_handle=7).create() == 8


def test_work_completes_in_order_and_time_passes_only_when_waited_for(clock, streams):
    streams.enqueue(1, 10)
    first = streams.record_event(1)
    streams.enqueue(1, 5)
    second = streams.record_event(1)
    assert not streams.query(first)
    assert clock.now_ns == 0
    streams.synchronize(first)
    assert clock.now_ns == 10
    assert streams.query(first)
    assert not streams.query(second)
    streams.synchronize_stream(1)
    assert clock.now_ns == 15


def test_an_event_on_an_idle_stream_is_complete(streams):
    assert streams.query(streams.record_event(1))


def test_work_queued_later_starts_no_earlier_than_now(clock, streams):
    streams.enqueue(1, 10)
    streams.synchronize_stream(1)
    other = streams.create()
    streams.enqueue(other, 5)
    assert streams.record_event(other).time_ns == 15


def test_streams_run_side_by_side(clock, streams):
    other = streams.create()
    streams.enqueue(1, 10)
    streams.enqueue(other, 30)
    streams.synchronize_stream(1)
    assert clock.now_ns == 10
    streams.synchronize_device()
    assert clock.now_ns == 30


def test_wait_event_delays_only_later_work(streams):
    other = streams.create()
    streams.enqueue(1, 10)
    streams.enqueue(other, 3)
    before = streams.record_event(other)
    streams.wait_event(other, streams.record_event(1))
    streams.enqueue(other, 3)
    assert before.time_ns == 3
    assert streams.record_event(other).time_ns == 13


def test_wait_for_a_past_event_changes_nothing(streams):
    other = streams.create()
    streams.enqueue(other, 3)
    streams.wait_event(other, streams.record_event(1))
    assert streams.record_event(other).time_ns == 3


def test_synchronize_for_a_past_event_lets_no_time_pass(clock, streams):
    event = streams.record_event(1)
    streams.enqueue(1, 10)
    streams.synchronize(event)
    assert clock.now_ns == 0


def test_events_hold_across_devices_of_one_clock(clock, streams):
    other_device = Streams(clock)
    streams.enqueue(1, 10)
    other_device.wait_event(1, streams.record_event(1))
    other_device.enqueue(1, 1)
    assert other_device.record_event(1).time_ns == 11


@pytest.mark.parametrize(
    "call",
    [
        lambda streams: streams.enqueue(9, 1),
        lambda streams: streams.record_event(9),
        lambda streams: streams.wait_event(9, streams.record_event(1)),
        lambda streams: streams.synchronize_stream(9),
    ],
)
def test_unknown_stream(streams, call):
    with pytest.raises(WorldError, match=r"^the device has no stream 0x9$"):
        call(streams)
