"""``PYTORCH_NPU_ALLOC_CONF``: torch's own parser as oracle for its options, sources of torch_npu for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from npusim.device.hbm import HbmAddressError
from npusim.memory.config import AllocatorConfig, change_allocator_settings, parse_allocator_config
from npusim.memory.config_parser import SIZE_MAX

MIB = 1024**2


@pytest.mark.sim_only("with torch_npu, torch's parser sets the allocator of the process, for all later tests")
@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19",
        "max_split_size_mb:20",
        "max_split_size_mb:64x",
        "max_split_size_mb:+64",
        "max_non_split_rounding_mb:19",
        "garbage_collection_threshold:0.5;",
        "garbage_collection_threshold:.5e0",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:1",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "roundup_power2_divisions:[256:3]",
        "roundup_power2_divisions:[200:1]",
        "roundup_power2_divisions:[>:1,3:2]",
        "roundup_power2_divisions:[]",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:6",
        "expandable_segments:False",
        "expandable_segments:yes",
        "pinned_use_background_threads:1",
        "pinned_use_background_threads:False,max_split_size_mb:1",
        " max_split_size_mb\t:\n64 ,",
    ],
)
def test_torch_gives_the_same_answer(text: str) -> None:
    answers = []
    for parse in (torch._C._accelerator_setAllocatorSettings, parse_allocator_config):
        try:
            parse(text)
        except (RuntimeError, ValueError) as error:
            answers.append(f"{type(error).__name__}: {error}")
        else:
            answers.append("ok")
    assert answers[0] == answers[1]


@pytest.mark.sim_only("torch_npu gives torch's parser keys of its own")
@pytest.mark.parametrize("text", ["max_split_size_mb", "max_split_size_mb 30", ":", "roundup_power2_divisions:[256:1"])
def test_torch_stumbles_over_the_same_ends(text: str) -> None:
    with pytest.raises(RuntimeError, match=r"i < config_\.size\(\) INTERNAL ASSERT FAILED .*Index out of bounds"):
        torch._C._accelerator_setAllocatorSettings(text)
    with pytest.raises(
        (RuntimeError, ValueError), match=r"i < config_\.size\(\) INTERNAL ASSERT FAILED|Unrecognized key"
    ):
        parse_allocator_config(text)


def test_values() -> None:
    config = parse_allocator_config(
        "large_segment_size_mb:12,max_split_size_mb:12,roundup_power2_divisions:[256:1,512:2,1024:4,>:8],"
        "base_addr_aligned_kb:0,page_size:1g,per_process_memory_fraction:0.25,pinned_max_cached_size_mb:3"
    )
    assert config == AllocatorConfig(
        large_segment_size=12 * MIB,
        max_split_size=12 * MIB,
        roundup_power2_divisions=(1,) * 9 + (2, 4) + (8,) * 5,
        base_addr_aligned_size=0,
        page_size_1g=True,
        per_process_memory_fraction=0.25,
        pinned_max_cached_size=3 * MIB,
    )
    assert parse_allocator_config("max_split_size_mb:-1").max_split_size == SIZE_MAX // MIB * MIB


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("base_addr_aligned_kb:-1", "CachingAllocator option base_addr_aligned_kb is invalid."),
        ("base_addr_aligned_kb:08", "CachingAllocator option base_addr_aligned_kb error, must be [0~16], dtype is int"),
        ("segment_size_mb:513", "CachingAllocator option segment_size_mb error, must be [20, 512], dtype is int"),
        ("multi_stream_lazy_reclaim:1", "Expected a single True/False argument for multi_stream_lazy_reclaim"),
        ("throw_on_npumalloc_oom:yes", "Expected a single True/False argument for throw_on_npumalloc_oom"),
        ("per_process_memory_fraction:-0.1", "per_process_memory_fraction is invalid, set it in [0.0, 1.0]"),
        ("per_process_memory_fraction:x", "stod"),
    ],
)
def test_texts_of_torch_npu(text: str, answer: str) -> None:
    with pytest.raises(RuntimeError) as error:
        parse_allocator_config(text)
    assert str(error.value) == answer


def test_environment() -> None:
    one, other = {"PYTORCH_NPU_ALLOC_CONF": "page_size:1g"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert AllocatorConfig.from_environment({}) == AllocatorConfig()
    assert AllocatorConfig.from_environment(one).page_size_1g
    assert AllocatorConfig.from_environment(other).expandable_segments
    assert not AllocatorConfig.from_environment(one | other, "2.10").expandable_segments
    with pytest.raises(RuntimeError, match="Both PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF have been set"):
        AllocatorConfig.from_environment(one | other)


def test_change_at_run_time_resets_what_torch_resets() -> None:
    before = parse_allocator_config("max_split_size_mb:40,large_segment_size_mb:30,base_addr_aligned_kb:8")
    after, refusal = change_allocator_settings("expandable_segments:True", before)
    assert refusal is None
    assert after == AllocatorConfig(
        expandable_segments=True,
        large_segment_size=30 * MIB,
        max_non_split_rounding_size=30 * MIB,
        base_addr_aligned_size=8192,
    )


@pytest.mark.parametrize(
    ("version", "error_class", "key"),
    [("2.13", ValueError, "page_size"), ("2.10", RuntimeError, "max_split_size_mb")],
)
def test_not_all_can_change_at_run_time(version: str, error_class: type[Exception], key: str) -> None:
    after, refusal = change_allocator_settings(f"{key}:1", AllocatorConfig(), version=version)
    assert after == AllocatorConfig()
    assert type(refusal) is error_class
    assert str(refusal) == f"torch_npu.npu.memory._set_allocator_settings() unsupported setting: {key}"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("no_such_key:1,expandable_segments:True", "roundup_power2_divisions:4"),
        ("expandable_segments:True,garbage_collection_threshold:0.5", "roundup_power2_divisions:4"),
        ("max_split_size_mb:5", ""),
        ("max_split_size_mb:32,throw_on_npumalloc_oom:maybe", "max_split_size_mb:32"),
        ("throw_on_npumalloc_oom:maybe,max_split_size_mb:32", "max_split_size_mb:32"),
        ("throw_on_npumalloc_oom:True,per_process_memory_fraction:2", "throw_on_npumalloc_oom:True"),
    ],
)
def test_what_a_refused_change_leaves_in_force(text: str, after: str) -> None:
    before = parse_allocator_config("roundup_power2_divisions:4")
    config, refusal = change_allocator_settings(text, before)
    assert refusal is not None
    assert config == parse_allocator_config(after)


def test_oversize_parts_of_segments_are_never_given_back(bench: Callable[..., Any]) -> None:
    device = bench(256 * MIB)
    device.free(device.malloc(100 * MIB, 0))
    device.malloc(MIB + 1, 0)
    device.allocator.set_allocator_settings("max_split_size_mb:40")
    with pytest.raises(HbmAddressError, match="a part of a segment"):
        device.malloc(200 * MIB, 0)
    device.malloc(100, 0)
    assert device.allocator.memory_reserved == device.ledger.used_bytes == 104 * MIB


def test_refused_combination_stays_in_force(bench: Callable[..., Any]) -> None:
    device = bench(conf="expandable_segments:True")
    with pytest.raises(RuntimeError, match="cannot be enabled with `expandable_segments`"):
        device.allocator.set_allocator_settings("max_split_size_mb:32")
    device.malloc(62737651, 0)
    assert device.layout() == "Lx@0[62737920*,176640-]"
    assert device.allocator.memory_stats()["oversize_allocations.current"] == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("max_split_size_mb:20", "CachingAllocator option max_split_size_mb too small, must be > 20"),
        ("max_split_size_mb:x", "CachingAllocator option max_split_size_mb is invalid."),
        ("max_split_size_mb", "Error parsing CachingAllocator settings, expected :"),
        ("max_split_size_mb:", "Error, expecting max_split_size_mb value"),
        ("max_split_size_mb:21 page_size:1g", "CachingAllocator option max_split_size_mb is invalid."),
        ("page_size:1g:", "Error parsing CachingAllocator settings, expected ,"),
        ("garbage_collection_threshold:0", "garbage_collect_threshold too small, set it 0.0~1.0"),
        ("garbage_collection_threshold:1", "garbage_collect_threshold too big, set it 0.0~1.0"),
        (
            "roundup_power2_divisions:3",
            "For roundups, the divisions has to be power of 2 or 0 to disable roundup ",
        ),
        ("roundup_power2_divisions:[3:1]", "For roundups, the intervals have to be power of 2 "),
        ("expandable_segments:true", "Expected a single True/False argument for expandable_segments"),
        ("large_segment_size_mb:30", "Unrecognized CachingAllocator option: large_segment_size_mb"),
        ("pinned_mem_register:", "Error, expecting m_pinned_mem_register value"),
    ],
)
def test_texts_of_2_10(text: str, answer: str) -> None:
    with pytest.raises(RuntimeError) as error:
        parse_allocator_config(text, version="2.10")
    assert str(error.value) == answer


def test_values_of_2_10() -> None:
    text = "max_split_size_mb:21,roundup_power2_divisions:0,segment_size_mb:64"
    assert parse_allocator_config(text, version="2.10") == AllocatorConfig(
        max_split_size=21 * MIB, segment_size=64 * MIB
    )


def test_allocator_follows_a_change(bench: Callable[..., Any]) -> None:
    device = bench()
    device.free(device.malloc(30 * MIB, 0))
    device.allocator.set_allocator_settings("expandable_segments:True")
    first = device.malloc(2 * MIB, 0)
    assert device.layout().startswith("L@0[2097664*,")
    device.malloc(40 * MIB, 0)
    assert "Lx@0[41943552*," in device.layout()
    device.allocator.set_allocator_settings("expandable_segments:False")
    device.malloc(12 * MIB, 0)
    device.free(first)
    assert device.layout().count("x@") == 1


@pytest.mark.parametrize("fraction", [1, "0.5"])
def test_fraction_is_a_float(bench: Callable[..., Any], fraction: Any) -> None:
    with pytest.raises(TypeError, match="must be `float`"):
        bench().allocator.set_per_process_memory_fraction(fraction)


def test_fraction_in_range(bench: Callable[..., Any]) -> None:
    allocator = bench().allocator
    with pytest.raises(ValueError, match=r"Invalid fraction value: 1\.5\. Allowed range: 0~1"):
        allocator.set_per_process_memory_fraction(1.5)
    allocator.set_per_process_memory_fraction(0.5)
    assert allocator.get_per_process_memory_fraction() == 0.5
    allocator.set_per_process_memory_fraction(1.0)
    assert allocator.get_per_process_memory_fraction() == 1.0
