"""The record of events, and snapshots as torch's own viewer reads them."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from npusim.memory.history import python_stack
from npusim.memory.out_of_memory import OutOfMemoryError
from npusim.memory.snapshot import Snapshot, dump_snapshot, take_snapshot

MIB = 1024**2
CAPACITY = 256 * MIB
MakeBench = Callable[..., Any]


def actions(device: Any) -> list[str]:
    return [entry.action for entry in device.allocator.history.entries]


def use(device: Any) -> None:
    """Some of everything that is recorded."""
    first = device.malloc(1000, 0)
    second = device.malloc(30 * MIB, 1)
    device.allocator.record_stream(second, 2)
    device.free(second)
    device.malloc(300, 0)
    device.free(first)
    device.allocator.empty_cache()
    with pytest.raises(OutOfMemoryError):
        device.malloc(1 << 30, 0)


def test_events_of_fixed_segments(bench: MakeBench) -> None:
    device = bench(CAPACITY)
    device.allocator.record_memory_history()
    use(device)
    assert actions(device) == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed", "alloc",
        "free_requested", "free_completed", "segment_free", "oom",
    ]  # fmt: skip


def test_events_of_expandable_segments(bench: MakeBench) -> None:
    device = bench(CAPACITY, "expandable_segments:True")
    device.allocator.record_memory_history()
    use(device)
    assert actions(device) == [
        "segment_map", "alloc", "segment_map", "alloc", "free_requested", "free_completed", "alloc",
        "free_requested", "free_completed", "segment_unmap", "oom",
    ]  # fmt: skip
    sizes = [entry.size for entry in device.allocator.history.entries]
    assert sizes[:4] == [2 * MIB, 1000, 40 * MIB, 30 * MIB]
    assert sizes[-2:] == [40 * MIB, (1 << 30) + 512]
    assert device.allocator.history.entries[-1].address == device.hbm.mem_get_info()[0]


def test_nothing_is_recorded_unless_switched_on(bench: MakeBench) -> None:
    device = bench(CAPACITY)
    use(device)
    assert actions(device) == []
    device.allocator.record_memory_history(max_entries=3)
    device.free(device.malloc(1000, 0))
    assert actions(device) == ["alloc", "free_requested", "free_completed"]
    device.malloc(1000, 0)
    assert actions(device) == ["free_requested", "free_completed", "alloc"]
    device.allocator.record_memory_history("state")
    device.free(device.malloc(1000, 0))
    assert actions(device) == ["free_completed"]
    device.allocator.record_memory_history(None)
    device.malloc(1000, 0)
    assert actions(device) == []


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("some",), "expected state to be 'state', 'all', or None"),
        (("all", "some"), "expected context to be 'state', 'alloc', 'all', or None"),
    ],
)
def test_words(bench: MakeBench, arguments: tuple[str, ...], answer: str) -> None:
    with pytest.raises(RuntimeError) as error:
        bench().allocator.record_memory_history(*arguments)
    assert str(error.value) == answer


def allocate_here(device: Any) -> int:
    address: int = device.malloc(1000, 0)
    return address


def free_here(device: Any, address: int) -> None:
    device.free(address)


@pytest.mark.parametrize(
    ("context", "in_snapshot", "in_trace"),
    [
        (None, [], [None] * 4),
        ("state", ["allocate_here"], [None] * 4),
        ("alloc", ["allocate_here"], ["allocate_here"] * 4),
        ("all", ["allocate_here"], ["allocate_here"] * 2 + ["free_here"] * 2),
    ],
)
def test_call_stacks(bench: MakeBench, context: str | None, in_snapshot: list[str], in_trace: list[str | None]) -> None:
    device = bench()
    device.allocator.record_memory_history(context=context)
    address = allocate_here(device)
    frames = device.allocator.snapshot()[0]["blocks"][0]["frames"]
    assert [frame["name"] for frame in frames[:1]] == in_snapshot
    assert all(frame["filename"] for frame in frames)
    free_here(device, address)
    entries = [entry for entry in device.allocator.history.entries if entry.action != "snapshot"]
    assert [entry.frames and entry.frames[0]["name"] for entry in entries] == in_trace
    assert device.allocator.snapshot()[0]["blocks"][0]["frames"] == []


def test_stack_names_the_caller_first() -> None:
    assert python_stack()[0]["name"] == "test_stack_names_the_caller_first"


@pytest.fixture(params=["", "expandable_segments:True"])
def snapshot(bench: MakeBench, request: pytest.FixtureRequest) -> Snapshot:
    devices = [bench(CAPACITY, request.param, device_index=index) for index in range(2)]
    for device in devices:
        device.allocator.record_memory_history()
        use(device)
        device.workspaces.malloc(1000, 0)
    return take_snapshot([device.allocator for device in devices])


def test_file_for_the_viewer(snapshot: Snapshot, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    dump_snapshot(snapshot, path)
    data = path.read_bytes()
    assert pickle.loads(data) == snapshot
    assert [argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "PROTO"] == [4]


def test_viewer_opens_it(snapshot: Snapshot) -> None:
    assert "segments" in _memory_viz.segsum(snapshot)
    assert "alloc" in _memory_viz.trace(snapshot)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<script" in plot(snapshot)
    for flames in (_memory_viz.segments, _memory_viz.memory):
        assert "active_allocated" in flames(snapshot, format_flamegraph=str)
    assert _memory_viz.compare(snapshot["segments"], [], format_flamegraph=str)


def test_devices_follow_one_another(snapshot: Snapshot) -> None:
    assert sorted({segment["device"] for segment in snapshot["segments"]}) == [0, 1]
    assert len(snapshot["device_traces"]) == 2
    ooms = [entry for trace in snapshot["device_traces"] for entry in trace if entry["action"] == "oom"]
    assert all("device_free" in entry and "addr" not in entry for entry in ooms)
    assert len(ooms) == 2


def test_trace_entries_of_2_10_name_no_pool(bench: MakeBench) -> None:
    device = bench(version="2.10")
    device.allocator.record_memory_history(context=None)
    device.malloc(1, 0)
    (trace,) = take_snapshot([device.allocator])["device_traces"]
    assert {key for entry in trace for key in entry} == {"action", "addr", "size", "stream"}
