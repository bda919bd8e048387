"""``torch.npu``: streams and events."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

MIB = 1 << 20


@pytest.fixture(autouse=True)
def default_stream_again(npu_world):
    yield
    torch.npu.set_stream(torch.npu.default_stream())


def test_the_default_stream_is_current_at_first():
    stream = torch.npu.current_stream()
    assert stream == torch.npu.default_stream()
    assert stream.stream_id == 0
    assert stream.device == torch.device("npu", 0)
    assert isinstance(stream, torch.npu.Stream)
    assert isinstance(stream, torch.Stream)


def test_new_streams_come_from_a_pool_of_32():
    ids = [torch.npu.Stream().stream_id for _ in range(64)]
    assert sorted(set(ids)) == list(range(96, 128))
    assert ids[:32] == ids[32:]
    assert all((after - before) % 32 == 1 for before, after in pairwise(ids))


@pytest.mark.parametrize(("priority", "first"), [(0, 96), (5, 96), (-1, 128), (-5, 128)])
def test_priorities_have_pools_of_their_own(priority, first):
    assert first <= torch.npu.Stream(priority=priority).stream_id < first + 32
    with pytest.raises(RuntimeError, match=r"NPU dose not support Stream\.get_priority\(\) currently\."):
        _ = torch.npu.Stream(priority=priority).priority


def test_streams_are_equal_by_id_and_device():
    stream = torch.npu.Stream()
    same = torch.npu.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    assert same == stream
    assert hash(same) == hash(stream)
    assert same.npu_stream == stream.npu_stream
    assert stream != torch.npu.Stream()
    assert stream != 3
    assert re.fullmatch(r"<torch_npu\.npu\.Stream device=npu:0 npu_stream=0x[0-9a-f]+>", repr(stream))


def test_stream_contexts():
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream
        with torch.npu.StreamContext(None):
            assert torch.npu.current_stream() == stream
        with torch.npu.stream(torch.npu.default_stream()):
            assert torch.npu.current_stream().stream_id == 0
        assert torch.npu.current_stream() == stream
    assert torch.npu.current_stream().stream_id == 0
    with stream:
        assert torch.npu.current_stream() == stream
    assert torch.npu.current_stream().stream_id == 0


def test_stream_contexts_end_with_an_error():
    with pytest.raises(ZeroDivisionError), torch.npu.stream(torch.npu.Stream()):
        assert 1 // 0
    assert torch.npu.current_stream().stream_id == 0


def test_set_stream():
    stream = torch.npu.Stream()
    torch.npu.set_stream(stream)
    assert torch.npu.current_stream() == stream
    torch.npu.set_stream(None)
    assert torch.npu.current_stream() == stream
    with pytest.raises(AttributeError, match="'int' object has no attribute"):
        torch.npu.set_stream(3)


def test_idle_streams_and_events_are_complete():
    stream = torch.npu.Stream()
    event = stream.record_event()
    stream.synchronize()
    assert stream.query()
    assert event.query()
    event.synchronize()
    stream.wait_event(event)
    stream.wait_stream(torch.npu.current_stream())
    event.wait(stream)
    event.wait()
    torch.npu.synchronize()


def test_an_event_never_recorded_is_complete():
    event = torch.npu.Event()
    assert event.query()
    event.synchronize()
    event.wait()
    torch.npu.current_stream().wait_event(event)
    assert repr(event) == "<torch_npu.npu.Event uninitialized>"
    assert isinstance(event, torch.Event)


def test_elapsed_time_needs_recorded_events():
    recorded = torch.npu.Event(enable_timing=True)
    recorded.record()
    for first, second in (
        (recorded, torch.npu.Event(enable_timing=True)),
        (torch.npu.Event(enable_timing=True), recorded),
    ):
        with pytest.raises(RuntimeError, match="Both events must be recorded before calculating elapsed time"):
            first.elapsed_time(second)


def test_events_are_recorded_on_the_current_stream_and_know_their_device():
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        event = torch.npu.Event()
        event.record()
    assert event.device == torch.device("npu", 0)
    assert repr(event) != "<torch_npu.npu.Event uninitialized>"
    assert isinstance(event.recorded_time(), int)


def test_memory_is_tied_to_the_stream_it_was_allocated_on():
    torch.npu.synchronize()
    torch.npu.empty_cache()
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
    address = tensor.data_ptr()
    del tensor
    other = torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
    assert other.data_ptr() != address
    with torch.npu.stream(stream):
        again = torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
    assert again.data_ptr() == address


def test_record_stream_keeps_the_memory_until_that_stream_is_done():
    torch.npu.synchronize()
    torch.npu.empty_cache()
    tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
    before = torch.npu.memory_stats()["requested_bytes.all.current"]
    tensor.record_stream(torch.npu.Stream())
    del tensor
    # freed, but not given out again before the next allocation has looked at the event
    assert torch.npu.memory_stats()["requested_bytes.all.current"] == before
    torch.empty(1, device="npu")
    assert torch.npu.memory_stats()["requested_bytes.all.current"] == before - 30 * MIB
    with pytest.raises(RuntimeError, match="unknown parameter type"):
        torch.empty(1, device="npu").record_stream(3)


def test_record_stream_of_host_memory_is_refused():
    with pytest.raises(NotImplementedError, match="Could not run 'aten::record_stream' with arguments from"):
        torch.empty(1).record_stream(torch.npu.Stream())


@pytest.mark.sim_only("durations are set by hand")
def test_events_and_streams_in_virtual_time(npu_world):
    streams = npu_world.cards[0].streams
    begin, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    side = torch.npu.Stream()
    begin.record()
    streams.enqueue(torch.npu.current_stream().npu_stream, 3_000_000)
    end.record()
    assert not end.query()
    assert not torch.npu.current_stream().query()
    assert side.query()
    side.wait_event(end)
    streams.enqueue(side.npu_stream, 500_000)
    assert begin.elapsed_time(end) == 3.0
    assert npu_world.clock.now == 3000
    assert end.query()
    assert not side.query()
    torch.npu.synchronize()
    assert npu_world.clock.now == 3500
    assert end.recorded_time() == 3000


@pytest.mark.sim_only("durations are set by hand")
def test_freed_memory_comes_back_in_virtual_time(npu_world):
    side = torch.npu.Stream()
    npu_world.cards[0].streams.enqueue(side.npu_stream, 100_000)
    tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
    address = tensor.data_ptr()
    tensor.record_stream(side)
    del tensor
    waiting = torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
    assert waiting.data_ptr() != address
    side.synchronize()
    assert torch.empty(30 * MIB, dtype=torch.uint8, device="npu").data_ptr() == address


@pytest.mark.sim_only("the driver's refusal; its text is assumed")
def test_elapsed_time_needs_events_with_timing(npu_world):
    events = [torch.npu.Event(enable_timing=flag) for flag in (True, False)]
    for event in events:
        event.record()
    with pytest.raises(RuntimeError, match="Both events must be created with argument 'enable_timing=True'"):
        events[0].elapsed_time(events[1])


@pytest.mark.npu_settings(num_devices=2)
def test_streams_of_another_device(npu_world):
    stream = torch.npu.Stream(1)
    assert stream.device == torch.device("npu", 1)
    with torch.npu.stream(stream):
        assert torch.npu.current_device() == 1
        assert torch.npu.current_stream() == stream
        assert torch.npu.current_stream(0).stream_id == 0
    assert torch.npu.current_device() == 0
    assert torch.npu.current_stream(1).stream_id == 0
    torch.npu.set_stream(stream)
    assert torch.npu.current_device() == 1
    torch.npu.set_device(0)
    assert torch.npu.current_stream().stream_id == 0
    assert torch.npu.current_stream(1) == stream
    assert torch.npu.Stream(0) != stream


@pytest.mark.npu_settings(num_devices=2)
@pytest.mark.sim_only("a card's process has made streams before")
def test_each_device_has_pools_of_its_own(npu_world):
    assert torch.npu.Stream(0).stream_id == torch.npu.Stream(1).stream_id


@pytest.mark.npu_settings(num_devices=2)
def test_events_belong_to_the_device_they_were_recorded_on(npu_world):
    event = torch.npu.Event()
    event.record(torch.npu.Stream(1))
    assert event.device == torch.device("npu", 1)
    torch.npu.current_stream().wait_event(event)
    with pytest.raises(RuntimeError, match=r"^Event device \x01 does not match recording stream's device "):
        event.record(torch.npu.Stream(0))


@pytest.mark.npu_settings(num_devices=2)
@pytest.mark.sim_only("ranks of a world")
def test_a_stream_set_by_one_rank_is_not_the_others(npu_world):
    def rank(number: int) -> int:
        torch.npu.set_device(number)
        if number == 0:
            torch.npu.set_stream(torch.npu.Stream())
        return torch.npu.current_stream().stream_id

    assert npu_world.run_ranks([lambda: rank(0), lambda: rank(1)]) == [96, 0]
