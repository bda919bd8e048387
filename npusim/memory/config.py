"""``PYTORCH_NPU_ALLOC_CONF``: its options, which values torch_npu accepts, and the errors it answers to others.

Read in c10/core/AllocatorConfig.h of torch 2.13.0 and NPUAllocatorConfig.cpp of torch_npu (9e73e708). The line with
date, process and error code that torch_npu appends to some texts is left out (``TORCH_NPU_COMPACT_ERROR_OUTPUT=1``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from npusim.memory.rounding import KIB, LARGE_SEGMENT_BYTES, MIB, MIN_LARGE_ALLOC_BYTES

SIZE_MAX: Final = 2**64 - 1
"""Unlimited, as the C++ has it; statistics show it as -1."""

_NUM_SLOTS: Final = 16
_OUT_OF_BOUNDS: Final = (
    "i < config_.size() INTERNAL ASSERT FAILED, please report a bug to PyTorch. Index out of bounds in ConfigTokenizer"
)
_SETTABLE_AT_RUN_TIME: Final = frozenset(
    {
        "expandable_segments", "max_split_size_mb", "max_non_split_rounding_mb", "release_lock_on_npumalloc",
        "throw_on_npumalloc_oom", "per_process_memory_fraction", "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings of the caching allocator; sizes in bytes, :data:`SIZE_MAX` where unlimited."""

    max_split_size: int = SIZE_MAX
    max_non_split_rounding_size: int = LARGE_SEGMENT_BYTES
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * _NUM_SLOTS
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT_BYTES
    segment_size: int = 0
    page_size_1g: bool = False
    base_addr_aligned_size: int = 16 * KIB
    multi_stream_lazy_reclaim: bool = False
    per_process_memory_fraction: float = 1.0
    throw_on_npumalloc_oom: bool = False
    release_lock_on_npumalloc: bool = False
    pinned_use_background_threads: bool = False
    pinned_max_round_threshold: int = SIZE_MAX
    pinned_max_cached_size: int = SIZE_MAX
    pin_memory_expandable_segments: bool = False
    pinned_mem_register: bool = False
    pinned_reserve_segment_size_mb: int = 0

    @property
    def expandable_large_page(self) -> int:
        """Bytes mapped at a time by an expandable segment of the large pool, where ``page_size:1g`` is not in force."""
        if self.large_segment_size == LARGE_SEGMENT_BYTES and self.segment_size:
            return self.segment_size
        return self.large_segment_size

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AllocatorConfig:
        """The configuration that torch_npu would read from these environment variables.

        Raises:
            RuntimeError: Both variables are set, or as :func:`parse_allocator_config`.
            ValueError: As :func:`parse_allocator_config`.
        """
        if "PYTORCH_NPU_ALLOC_CONF" in environment and "PYTORCH_ALLOC_CONF" in environment:
            raise RuntimeError(
                "Both PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF have been set, please set only one of them."
            )
        text = environment.get("PYTORCH_NPU_ALLOC_CONF", environment.get("PYTORCH_ALLOC_CONF", ""))
        return parse_allocator_config(text)


def parse_allocator_config(text: str, base: AllocatorConfig | None = None) -> AllocatorConfig:
    """Read a ``key:value,key:value`` string.

    Args:
        text: E.g. ``expandable_segments:True,base_addr_aligned_kb:8``; empty: nothing changes.
        base: What is in force so far. Options that torch resets on each parse (max_split_size_mb,
            max_non_split_rounding_mb, garbage_collection_threshold, roundup_power2_divisions) do not carry over.

    Raises:
        ValueError: Where torch_npu raises it, with its text; likewise RuntimeError.
    """
    return _parse(text, base if base is not None else AllocatorConfig(), settable=None)


def change_allocator_settings(text: str, base: AllocatorConfig) -> AllocatorConfig:
    """As ``torch_npu.npu.memory._set_allocator_settings``: a parse, but only of options that can change at run time.

    Raises:
        ValueError: An option cannot change at run time, or as :func:`parse_allocator_config`.
    """
    return _parse(text, base, settable=_SETTABLE_AT_RUN_TIME)


class _Tokens:
    """The string cut at ``, : [ ]``, without white space; messages name token indices."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text, flags=re.ASCII))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> str:
        if index >= len(self._tokens):
            raise RuntimeError(_OUT_OF_BOUNDS)
        return self._tokens[index]

    def end_of_value(self, key_index: int) -> int:
        """Index of the last token of the value of the key at ``key_index``."""
        end = key_index + 2
        if self[end] != "[":
            return end
        while self[end] != "]":
            end += 1
        return end

    def size(self, index: int) -> int:
        """The token as C's ``stoull`` reads it: leading digits count, a minus wraps around."""
        match = re.match(r"([+-]?)(\d+)", self[index])
        if match is None or int(match[2]) > SIZE_MAX:
            raise RuntimeError("stoull")
        return int(match[1] + match[2]) & SIZE_MAX

    def fraction(self, index: int) -> float:
        """The token as C's ``stod`` reads it."""
        match = re.match(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", self[index])
        if match is None:
            raise RuntimeError("stod")
        return float(match[0])

    def boolean(self, index: int) -> bool:
        """``True`` or ``False``, as torch core reads it."""
        if self[index] not in ("True", "False"):
            raise ValueError(f"Expected 'True' or 'False' at index {index} in ConfigTokenizer but got '{self[index]}'")
        return self[index] == "True"

    def npu_boolean(self, index: int, key: str) -> bool:
        """``True`` or ``False``, as torch_npu reads it."""
        if self[index] not in ("True", "False"):
            raise RuntimeError(f"Expected a single True/False argument for {key}")
        return self[index] == "True"

    def npu_integer(self, index: int, key: str) -> int:
        """Digits only, as torch_npu reads it."""
        if not re.fullmatch(r"\d+", self[index]):
            raise RuntimeError(f"CachingAllocator option {key} is invalid.")
        return int(self[index])


_Values = dict[str, Any]
_Handler = Callable[[_Tokens, int, _Values], None]


def _parse(text: str, base: AllocatorConfig, settable: Collection[str] | None) -> AllocatorConfig:
    tokens = _Tokens(text)
    if not len(tokens):
        return base
    keys = _checked_keys(tokens, settable)
    values: _Values = {
        "max_split_size": SIZE_MAX,
        "max_non_split_rounding_size": base.large_segment_size,
        "garbage_collection_threshold": 0.0,
        "roundup_power2_divisions": (0,) * _NUM_SLOTS,
        "large_segment_size": base.large_segment_size,
    }
    for handlers in (_TORCH_HANDLERS, _NPU_HANDLERS):  # torch reads its options first, then torch_npu its own
        for index, key in keys:
            if key in handlers:
                handlers[key](tokens, index + 2, values)
    config = replace(base, **values)
    limited = config.max_split_size != SIZE_MAX or config.garbage_collection_threshold != 0
    if config.expandable_segments and limited:
        raise RuntimeError(
            "`max_split_size_mb` or `garbage_collection_threshold`, cannot be enabled with "
            "`expandable_segments`, please set `expandable_segments` to `False`."
        )
    return config


def _checked_keys(tokens: _Tokens, settable: Collection[str] | None) -> list[tuple[int, str]]:
    keys = []
    index = 0
    while index < len(tokens):
        key = tokens[index]
        if key not in _TORCH_HANDLERS and key not in _NPU_HANDLERS:
            raise ValueError(f"Unrecognized key '{key}' in NPU allocator config, ")
        if settable is not None and key not in settable:
            raise ValueError(f"torch_npu.npu.memory._set_allocator_settings() unsupported setting: {key}")
        keys.append((index, key))
        index = tokens.end_of_value(index) + 2  # the token between two pairs is skipped unread
    return keys


def _max_split_size(tokens: _Tokens, index: int, values: _Values) -> None:
    values["max_split_size"] = _at_least_a_large_segment(tokens, index, values, "max_split_size_mb")


def _max_non_split_rounding(tokens: _Tokens, index: int, values: _Values) -> None:
    values["max_non_split_rounding_size"] = _at_least_a_large_segment(
        tokens, index, values, "max_non_split_rounding_mb"
    )


def _at_least_a_large_segment(tokens: _Tokens, index: int, values: _Values, key: str) -> int:
    least_mb = values["large_segment_size"] // MIB
    size_mb = tokens.size(index)
    if size_mb < least_mb:
        raise ValueError(f"CachingAllocator option {key} too small, must be >= {least_mb}")
    return min(size_mb, SIZE_MAX // MIB) * MIB


def _large_segment_size(tokens: _Tokens, index: int, values: _Values) -> None:
    size_mb = tokens.size(index)
    if size_mb <= MIN_LARGE_ALLOC_BYTES // MIB:
        raise ValueError("CachingAllocator option large_segment_size_mb must be > 10 MB")
    values["large_segment_size"] = size_mb * MIB


def _garbage_collection_threshold(tokens: _Tokens, index: int, values: _Values) -> None:
    threshold = tokens.fraction(index)
    if not 0.0 < threshold < 1.0:
        raise ValueError("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
    values["garbage_collection_threshold"] = threshold


def _roundup_power2_divisions(tokens: _Tokens, index: int, values: _Values) -> None:
    if tokens[index] != "[":
        num_steps = tokens.size(index)
        if not _is_power_of_two(num_steps):
            raise ValueError("For roundups, the divisions has to be power of 2 ")
        values["roundup_power2_divisions"] = (num_steps,) * _NUM_SLOTS
        return
    divisions = [0] * _NUM_SLOTS
    last_slot: int | None = None
    index += 1
    while tokens[index] != "]":
        num_steps = tokens.size(index + 2)
        if num_steps and not _is_power_of_two(num_steps):
            raise ValueError("For roundups, the divisions has to be power of 2 or 0 to disable roundup ")
        if tokens[index] == ">":
            for slot in range((last_slot or 0) + 1, _NUM_SLOTS):
                divisions[slot] = num_steps
        else:
            boundary_mb = tokens.size(index)
            if not _is_power_of_two(boundary_mb):
                raise ValueError("For roundups, the intervals have to be power of 2 ")
            slot = min(boundary_mb.bit_length() - 1, _NUM_SLOTS - 1)
            for filled in range(0 if last_slot is None else slot, slot + 1):
                divisions[filled] = num_steps
            last_slot = slot
        index += 3 if tokens[index + 3] == "]" else 4
    values["roundup_power2_divisions"] = tuple(divisions)


def _is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1


def _segment_size(tokens: _Tokens, index: int, values: _Values) -> None:
    size_mb = tokens.npu_integer(index, "segment_size_mb")
    if not 20 <= size_mb <= 512:
        raise RuntimeError("CachingAllocator option segment_size_mb error, must be [20, 512], dtype is int")
    values["segment_size"] = size_mb * MIB


def _base_addr_aligned(tokens: _Tokens, index: int, values: _Values) -> None:
    size_kb = tokens.npu_integer(index, "base_addr_aligned_kb")
    if size_kb > 16 or str(size_kb) != tokens[index]:
        raise RuntimeError("CachingAllocator option base_addr_aligned_kb error, must be [0~16], dtype is int")
    values["base_addr_aligned_size"] = size_kb * KIB


def _page_size(tokens: _Tokens, index: int, values: _Values) -> None:
    if tokens[index] != "1g":
        raise RuntimeError(f"Unsupported page_size value: {tokens[index]}")
    values["page_size_1g"] = True


def _per_process_memory_fraction(tokens: _Tokens, index: int, values: _Values) -> None:
    fraction = tokens.fraction(index)
    if not 0.0 <= fraction <= 1.0:
        raise RuntimeError("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
    values["per_process_memory_fraction"] = fraction


def _torch_boolean(name: str) -> _Handler:
    def handle(tokens: _Tokens, index: int, values: _Values) -> None:
        values[name] = tokens.boolean(index)

    return handle


def _npu_boolean(name: str) -> _Handler:
    def handle(tokens: _Tokens, index: int, values: _Values) -> None:
        values[name] = tokens.npu_boolean(index, name)

    return handle


def _size(name: str, unit: int) -> _Handler:
    def handle(tokens: _Tokens, index: int, values: _Values) -> None:
        values[name] = min(tokens.size(index), SIZE_MAX // unit) * unit

    return handle


_TORCH_HANDLERS: Final[dict[str, _Handler]] = {
    "large_segment_size_mb": _large_segment_size,
    "max_split_size_mb": _max_split_size,
    "max_non_split_rounding_mb": _max_non_split_rounding,
    "garbage_collection_threshold": _garbage_collection_threshold,
    "roundup_power2_divisions": _roundup_power2_divisions,
    "expandable_segments": _torch_boolean("expandable_segments"),
    "pinned_use_background_threads": _torch_boolean("pinned_use_background_threads"),
    "pinned_max_round_threshold_mb": _size("pinned_max_round_threshold", MIB),
    "pinned_max_cached_size_mb": _size("pinned_max_cached_size", MIB),
}
_NPU_HANDLERS: Final[dict[str, _Handler]] = {
    "segment_size_mb": _segment_size,
    "base_addr_aligned_kb": _base_addr_aligned,
    "page_size": _page_size,
    "per_process_memory_fraction": _per_process_memory_fraction,
    "multi_stream_lazy_reclaim": _npu_boolean("multi_stream_lazy_reclaim"),
    "throw_on_npumalloc_oom": _npu_boolean("throw_on_npumalloc_oom"),
    "release_lock_on_npumalloc": _npu_boolean("release_lock_on_npumalloc"),
    "pin_memory_expandable_segments": _npu_boolean("pin_memory_expandable_segments"),
    "pinned_mem_register": _npu_boolean("pinned_mem_register"),
    "pinned_reserve_segment_size_mb": _size("pinned_reserve_segment_size_mb", 1),
}
