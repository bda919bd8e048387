"""Figures and messages of public logs, tests and bug reports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npusim.device.faults import OtherProcess
from npusim.memory.out_of_memory import OutOfMemoryError
from npusim.memory.rounding import PAD_BYTES

KIB, MIB, GIB = 1024, 1024**2, 1024**3
UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
MESSAGES = json.loads((Path(__file__).parents[1] / "data" / "allocator" / "public_messages.json").read_text())

MakeBench = Callable[..., Any]


def printed(message: str, before: str = "", after: str = "", multiple: int = 1) -> int:
    """A number of bytes that prints as the figure between two texts of a message, and is such a multiple."""
    match = re.search(rf"{before}([\d.]+) (bytes|KiB|MiB|GiB){after}", message)
    assert match is not None
    exact = float(match[1]) * UNITS[match[2]]
    return round(exact / multiple) * multiple


def reserve_and_allocate(device: Any, reserved: int, allocated: int, wanted: int) -> None:
    """Reserve one segment and allocate part of it, so that no free piece of it has the wanted size."""
    device.free(device.malloc(reserved - PAD_BYTES, 0))
    left, holes = reserved - allocated, []
    while left:
        hole = min(left, wanted // 2 // MIB * MIB)
        holes.append(device.malloc(hole - PAD_BYTES, 0))
        device.malloc(2 * MIB - PAD_BYTES, 0)
        left -= hole
    device.malloc(allocated - len(holes) * 2 * MIB - PAD_BYTES, 0)
    for address in holes:
        device.free(address)


def run_out_of_memory(bench: MakeBench, message: str) -> Exception:
    """Bring a device to the figures of a message and make the request that fails."""
    device = bench(printed(message, after=" total capacity"))
    if "allowed" in message:
        device.allocator.set_per_process_memory_fraction(0.9)
    wanted = printed(message, before="allocate ", multiple=2 * MIB)
    reserved = printed(message, after=" reserved in total", multiple=2 * MIB)
    reserve_and_allocate(device, reserved, printed(message, after=" already allocated", multiple=2 * MIB), wanted)
    OtherProcess(device.ledger, "others", device.ledger.free_bytes - printed(message, after=" free;"))
    with pytest.raises(OutOfMemoryError) as error:
        device.malloc(wanted - PAD_BYTES, 0)
    return error.value


@pytest.mark.parametrize("case", MESSAGES, ids=lambda case: case["id"])
def test_message(bench: MakeBench, case: dict[str, str]) -> None:
    error = run_out_of_memory(bench, case["message"])
    assert str(error).startswith(f"{case['message']}.If reserved memory is >> allocated memory")


def note(bench: MakeBench, case_id: str) -> str:
    (case,) = (case for case in MESSAGES if case["id"] == case_id)
    (text,) = run_out_of_memory(bench, case["message"]).__notes__
    return str(text)


def test_note_names_the_other_process(bench: MakeBench) -> None:
    text = note(bench, "ascend-1670-other-process")
    assert re.search(r"other process: \d+ bytes \(56\.5[89] GiB\)", text)
    assert "Would have helped: the end of the other processes on the card" in text


def test_note_names_no_limit_that_would_not_help(bench: MakeBench) -> None:
    text = note(bench, "ascend-910b-48.78gib-mask-doc")
    assert "memory fraction" not in text
    assert re.search(r"Would have helped: 88\d{8} bytes less held by anyone", text)


def test_note_names_the_limit(bench: MakeBench) -> None:
    device = bench(256 * MIB)
    device.allocator.set_per_process_memory_fraction(0.5)
    device.malloc(116 * MIB - PAD_BYTES, 0)
    with pytest.raises(OutOfMemoryError) as error:
        device.malloc(40 * MIB - PAD_BYTES, 0)
    assert error.value.__notes__[0].endswith(f"Would have helped: a memory fraction of at least {156 / 256:.4f}.")


def test_note_names_fragmentation(bench: MakeBench) -> None:
    text = note(bench, "ascend-514-qwen2.5-vl-7b-profile-oom")
    assert "Would have helped: expandable_segments:True" in text
    assert re.search(r"Cached and free: \d+ bytes in 13 blocks, the largest .*; fragmentation 92%", text)


@pytest.mark.parametrize(("pad_bytes", "figures"), [(32, (167772672, 4608)), (0, (167772160, 4096))])
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_32_bytes_are_added(bench: MakeBench, conf: str, pad_bytes: int, figures: tuple[int, int]) -> None:
    """Ascend/pytorch test/npu/test_allocator_envs.py."""
    for num_bytes, allocated in zip((160 * MIB, 4096), figures, strict=True):
        device = bench(conf=conf, pad_bytes=pad_bytes)
        device.malloc(num_bytes, 0)
        assert device.allocator.memory_allocated == allocated


@pytest.mark.parametrize(
    ("conf", "num_bytes", "reserved"),
    [
        ("", 5 * MIB, 20 * MIB),
        ("large_segment_size_mb:50", 5 * MIB, 50 * MIB),
        ("expandable_segments:True,segment_size_mb:50,large_segment_size_mb:100", 5 * MIB, 100 * MIB),
        ("expandable_segments:True,segment_size_mb:128", 8 * MIB, 128 * MIB),
        ("roundup_power2_divisions:[>:1]", 514 * MIB, 516 * MIB),
        ("roundup_power2_divisions:[>:2]", 514 * MIB, 768 * MIB),
    ],
)
def test_reserved_by_one_request(bench: MakeBench, conf: str, num_bytes: int, reserved: int) -> None:
    """Ascend/pytorch test_large_segment_size.py, test_custom_segment_size.py; pytorch issue 161139 (with padding)."""
    device = bench(conf=conf)
    device.malloc(num_bytes, 0)
    assert device.allocator.memory_reserved == reserved


@pytest.mark.parametrize("conf", ["large_segment_size_mb:5", "large_segment_size_mb:50,max_split_size_mb:30"])
def test_rejected_segment_sizes(bench: MakeBench, conf: str) -> None:
    """Ascend/pytorch test_large_segment_size.py."""
    with pytest.raises(ValueError, match="must be"):
        bench(conf=conf)


def test_garbage_collection_frees_all_before_a_new_segment(bench: MakeBench) -> None:
    """Ascend/pytorch test_cachingallocator_gc.py; its fraction of 1.0 is no limit any more, so just below."""
    device = bench(conf="garbage_collection_threshold:0.1")
    device.allocator.set_per_process_memory_fraction(0.999)
    for address in [device.malloc(115_200_000, 0) for _ in range(100)]:
        device.free(address)
    device.malloc(576_000_000, 0)
    assert device.allocator.memory_reserved == 576_716_800


def test_small_request_does_not_take_a_large_block(bench: MakeBench) -> None:
    """pytorch PR 95827, as a counter-example."""
    device = bench()
    device.free(device.malloc(4 * GIB - PAD_BYTES, 0))
    device.malloc(10_000, 0)
    device.malloc(4 * GIB - PAD_BYTES, 0)
    assert device.allocator.memory_reserved == 4 * GIB + 2 * MIB


def test_oversize_block_is_not_used_for_a_much_smaller_request(bench: MakeBench) -> None:
    """pytorch PR 136174."""
    device = bench(conf="max_split_size_mb:400")
    device.free(device.malloc(1024 * MIB - PAD_BYTES, 0))
    device.malloc(512 * MIB - PAD_BYTES, 0)
    assert device.allocator.memory_reserved == (1024 + 512) * MIB
