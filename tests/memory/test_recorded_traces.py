"""The model against the real allocator, step by step: addresses, statistics, device calls, snapshots, error texts.

The format of the recordings is described in ``tests/data/allocator/README.md``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from npusim.device.faults import OtherProcess
from npusim.memory.blocks import ALLOCATED, PENDING, UNMAPPED
from npusim.memory.config import parse_allocator_config
from npusim.memory.out_of_memory import OutOfMemoryError
from npusim.memory.rounding import pad_bytes
from npusim.memory.snapshot import take_snapshot

DATA = Path(__file__).parents[1] / "data" / "allocator"
OTHER_RECORDINGS = {"pools_and_settings", "reports"}
TRACE_NAMES = sorted({path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz")} - OTHER_RECORDINGS)
SNAPSHOT_INTERVAL = 50
"""Traces of 2,000 operations are compared as a whole at every so many steps; all else at every step."""

_STATES = {ALLOCATED: 1, PENDING: 2}


def text_of(name: str) -> bytes:
    return gzip.decompress((DATA / f"{name}.json.gz").read_bytes())


def load(name: str) -> Any:
    """The recorded trace, or other recording, of this name."""
    return json.loads(text_of(name))


def refused_at_start(name: str) -> bool:
    """Whether the settings were refused; asked of every trace before any test runs, so without parsing it."""
    return b'"init_error"' in text_of(name)


def device_calls(events: list[tuple[Any, ...]]) -> list[list[Any]]:
    """Events of the device's memory as the traces write them, with runs of equal calls folded."""
    calls: list[list[Any]] = []
    for name, _, *numbers in events:
        call = [name.removeprefix("hbm."), *numbers]
        last = calls[-1] if calls else [None]
        if call[0] in ("phys_malloc", "phys_free"):
            if last[:2] == call:
                last[2] += 1
                continue
            call.append(1)
        elif call[0] in ("map", "unmap"):
            if last[0] == call[0] and last[2] == call[2] and last[1] + last[2] * last[3] == call[1]:
                last[3] += 1
                continue
            call.append(1)
        calls.append(call)
    return calls


def compact_snapshot(bench: Any) -> list[list[Any]]:
    """The segments as the traces write them."""
    segments = []
    for head in bench.allocator.blocks():
        if head.prev is not None and head.prev.state != UNMAPPED:
            continue
        blocks, total = [], 0
        block = head
        while block is not None and block.state != UNMAPPED:
            state = _STATES.get(block.state, 0)
            blocks.append([block.size, block.requested_bytes if state else 0, state])
            total += block.size
            block = block.next
        kind = "small" if head.free_list.pool.is_small else "large"
        segments.append([head.address, total, head.free_list.stream, kind, int(head.segment is not None), blocks])
    return sorted(segments)


def listed_snapshot(allocator: Any, pool_id: tuple[int, int] = (0, 0)) -> list[list[Any]]:
    """All that a snapshot tells, keys left out."""
    return [
        [value for key, value in segment.items() if key not in ("device", "frames", "blocks")]
        + [[[value for key, value in block.items() if key != "frames"] for block in segment["blocks"]]]
        for segment in allocator.snapshot(pool_id)
    ]


def checksum(shown: Any) -> int:
    """The checksum that the recordings have of statistics, calls or snapshots."""
    return zlib.crc32(json.dumps(shown, separators=(",", ":")).encode())


REPORTS = load("reports")
POOL_TRACES = load("pools_and_settings")


class Replay:
    """Carries out the operations of a trace one by one."""

    def __init__(self, bench: Any, trace: Any) -> None:
        made_with = trace["made_with"]
        self.bench = bench(trace["hbm"], trace["conf"], pad_bytes=pad_bytes(made_with["soc"], made_with["cann"]))
        OtherProcess(self.bench.ledger, "others", trace["hbm_used_by_others"])
        self.addresses: dict[int, int] = {}

    def step(self, operation: list[Any]) -> Any:
        """Carry out one operation and return its result as the traces write it."""
        bench, allocator = self.bench, self.bench.allocator
        match operation:
            case ["a", key, num_bytes]:
                try:
                    self.addresses[key] = allocator.malloc(num_bytes, bench.driver.stream)
                except OutOfMemoryError as error:
                    return str(error)
                return self.addresses[key]
            case ["f", key]:
                allocator.free(self.addresses.pop(key, 0))
            case ["e"]:
                allocator.empty_cache()
            case ["v"]:
                try:
                    allocator.empty_virt_addr_cache()
                except RuntimeError as error:
                    return str(error)
            case ["p"]:
                allocator.reset_peak_memory_stats()
            case ["c"]:
                allocator.reset_accumulated_memory_stats()
            case ["m", fraction]:
                allocator.set_per_process_memory_fraction(fraction)
            case ["s", stream]:
                bench.driver.stream = stream
            case ["r", key, stream]:
                if self.addresses.get(key):
                    allocator.record_stream(self.addresses[key], stream)
            case ["h", held]:
                bench.driver.held = bool(held)
            case ["P", key, use_on_oom, no_split]:
                allocator.create_pool((0, key), use_on_oom=use_on_oom, no_split=no_split)
            case ["b", key]:
                allocator.begin_allocate_to_pool((0, key))
            case ["n", key]:
                allocator.end_allocate_to_pool((0, key))
                allocator.release_pool((0, key))
            case ["d", key]:
                allocator.destroy_pool((0, key))
            case ["k", key]:
                return checksum(listed_snapshot(allocator, (0, key)))
            case ["x", key, stream]:
                if self.addresses.get(key):
                    allocator.erase_stream(self.addresses[key], stream)
            case ["t", text]:
                allocator.set_allocator_settings(text)
            case ["H", enabled, context]:
                allocator.record_memory_history(enabled, context)
            case ["g"]:
                return list(bench.hbm.mem_get_info())
            case _:
                raise ValueError(f"unknown operation {operation}")
        return None


@pytest.mark.parametrize("name", [name for name in TRACE_NAMES if not refused_at_start(name)])
def test_trace(bench: Any, name: str) -> None:
    compare(bench, name, SNAPSHOT_INTERVAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRACE_NAMES if name.startswith("random_")])
def test_trace_with_every_snapshot(bench: Any, name: str) -> None:
    compare(bench, name, 1)


def compare(bench: Any, name: str, snapshot_interval: int) -> None:
    trace = load(name)
    replay = Replay(bench, trace)
    keys = trace["stat_keys"]
    expected_stats = dict.fromkeys(keys, 0)
    interval = snapshot_interval if len(trace["ops"]) > 200 else 1
    log = replay.bench.log
    assert log.events is not None
    for index, (operation, step) in enumerate(zip(trace["ops"], trace["steps"], strict=True)):
        result, stats, calls, digest, snapshot = step
        log.events.clear()
        where = (index, operation)
        assert (where, replay.step(operation)) == (where, result)
        assert (where, device_calls(log.events)) == (where, calls)
        expected_stats.update(zip((keys[key] for key in stats[::2]), stats[1::2], strict=True))
        assert (where, replay.bench.allocator.memory_stats()) == (where, expected_stats)
        if snapshot is not None or index % interval == 0 or index + 1 == len(trace["ops"]):
            present = compact_snapshot(replay.bench)
            assert (where, checksum(present)) == (where, digest)
            assert snapshot is None or (where, present) == (where, snapshot)


@pytest.mark.parametrize(
    "index", [index if index < 12 else pytest.param(index, marks=pytest.mark.slow) for index in range(len(POOL_TRACES))]
)
def test_pools_and_settings(bench: Any, index: int) -> None:
    trace = POOL_TRACES[index]
    replay = Replay(bench, trace)
    allocator, log = replay.bench.allocator, replay.bench.log
    replay.bench.driver.query = lambda event: not replay.bench.driver.held  # the stand-in remembers no completion
    for number, (operation, step) in enumerate(zip(trace["ops"], trace["steps"], strict=True)):
        log.events.clear()
        result = replay.step(operation)
        stats, calls = list(allocator.memory_stats().values()), device_calls(log.events)
        present = [result, checksum(stats), checksum(calls), checksum(listed_snapshot(allocator))]
        assert (number, operation, present) == (number, operation, step)
    entries = allocator.history.entries
    events = [[entry.action, entry.address, entry.size, entry.stream, entry.pool_id] for entry in entries]
    assert checksum(events) == trace["trace"]


def test_stat_keys_in_order(bench: Any) -> None:
    trace = load("small_rounding")
    assert list(Replay(bench, trace).bench.allocator.memory_stats()) == trace["stat_keys"]


@pytest.mark.parametrize("name", [name for name in TRACE_NAMES if refused_at_start(name)])
def test_refused_configuration(bench: Any, name: str) -> None:
    trace = load(name)
    with pytest.raises(RuntimeError) as refusal:
        Replay(bench, trace)
    assert str(refusal.value) == trace["init_error"]


@pytest.mark.parametrize(("text", "answer"), json.loads((DATA / "conf_values.json").read_text()))
def test_configuration(text: str, answer: str) -> None:
    if answer == "ok":
        parse_allocator_config(text)
    else:
        with pytest.raises((RuntimeError, ValueError)) as refusal:
            parse_allocator_config(text)
        assert f"{refusal.type.__name__}: {refusal.value}" == answer


@pytest.mark.parametrize(("soc", "cann_version", "expected_bytes"), json.loads((DATA / "padding.json").read_text()))
def test_padding(soc: str, cann_version: str, expected_bytes: int) -> None:
    assert pad_bytes(soc, cann_version) == expected_bytes


class TestReports:
    """What torch_npu prints after one small program."""

    @pytest.fixture
    def used(self, bench: Any) -> Any:
        device = bench(REPORTS["mem_get_info"][1])
        device.allocator.record_memory_history(context=None)
        device.malloc(100, 0)
        freed = [device.malloc(num_mib << 20, 0) for num_mib in (5, 30)]
        device.malloc(3 << 20, 0)
        for address in freed:
            device.free(address)
        device.allocator.empty_cache()
        device.malloc(2 << 20, 0)
        return device

    def test_figures(self, used: Any) -> None:
        allocator = used.allocator
        assert list(used.hbm.mem_get_info()) == REPORTS["mem_get_info"]
        assert allocator.memory_allocated == REPORTS["memory_allocated"]
        assert allocator.max_memory_allocated == REPORTS["max_memory_allocated"]
        assert allocator.memory_reserved == REPORTS["memory_reserved"]
        assert allocator.max_memory_reserved == REPORTS["max_memory_reserved"]
        assert allocator.memory_stats() == REPORTS["memory_stats"]

    def test_summary(self, used: Any) -> None:
        assert used.allocator.memory_summary() == REPORTS["memory_summary"]
        assert used.allocator.memory_summary(abbreviated=True) == REPORTS["memory_summary_abbreviated"]

    def test_snapshot(self, used: Any) -> None:
        used.allocator.snapshot()  # the recorded program took one before, which is an event too
        snapshot = json.loads(json.dumps(take_snapshot([used.allocator])))
        for shown in (*snapshot["segments"], *snapshot["device_traces"][0]):
            assert shown["stream"] == 0
            shown["stream"] = "STREAM"
        assert snapshot == REPORTS["_snapshot"]
        assert snapshot["segments"] == REPORTS["memory_snapshot"]
        assert list(snapshot["segments"][0]) == list(REPORTS["memory_snapshot"][0])
