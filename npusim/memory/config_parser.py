"""Reads ``PYTORCH_NPU_ALLOC_CONF`` as torch_npu does: which values it accepts, and what it answers to others.

Sources: c10/core/AllocatorConfig.h of torch 2.13.0 and NPUAllocatorConfig.cpp of torch_npu, 9e73e708 for 2.13 and
5dd8ef3f for 2.10. The line with date, process and error code that torch_npu appends to some texts is left out
(``TORCH_NPU_COMPACT_ERROR_OUTPUT=1``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, Final

from npusim.memory.rounding import KIB, MIB, MIN_LARGE_ALLOC_BYTES

SIZE_MAX: Final = 2**64 - 1
"""Unlimited, as the C++ has it; statistics show it as -1."""

NUM_DIVISION_SLOTS: Final = 16
"""Entries of ``roundup_power2_divisions``: one per power of two from 1 MiB on."""

Values = dict[str, Any]
"""Settings read so far, by name of the field of :class:`npusim.memory.config.AllocatorConfig`."""

_Handler = Callable[["_Tokens", int, Values], None]

_OUT_OF_BOUNDS: Final = (
    "i < config_.size() INTERNAL ASSERT FAILED, please report a bug to PyTorch. Index out of bounds in ConfigTokenizer"
)


def parse_2_13(text: str, values: Values, settable: Collection[str] | None) -> None:
    """Enter the settings of a string into ``values`` by the rules of torch_npu 2.13.

    All keys are checked first; then torch core reads its options and torch_npu the others, and what was read before an
    error counts. A wrong token between two pairs goes unnoticed.

    Args:
        text: The string.
        values: Gets the settings; has ``large_segment_size``, which others are measured by.
        settable: The only keys allowed, or None for all.

    Raises:
        ValueError: Torch core's answer to a bad value or unknown key.
        RuntimeError: torch_npu's answer to a bad value.
    """
    tokens = _Tokens(re.sub(r"\s", "", text, flags=re.ASCII))
    keys = []
    index = 0
    while index < len(tokens):
        key = tokens[index]
        if key not in _TORCH_HANDLERS and key not in _NPU_HANDLERS:
            raise ValueError(f"Unrecognized key '{key}' in NPU allocator config, ")
        if settable is not None and key not in settable:
            raise ValueError(f"torch_npu.npu.memory._set_allocator_settings() unsupported setting: {key}")
        keys.append((index, key))
        index = tokens.end_of_value(index) + 2
    _reset(values)
    for handlers in (_TORCH_HANDLERS, _NPU_HANDLERS):
        for index, key in keys:
            if key in handlers:
                handlers[key](tokens, index + 2, values)


def parse_2_10(text: str, values: Values, settable: Collection[str] | None) -> None:
    """Enter the settings of a string into ``values`` by the rules of torch_npu 2.10.

    Arguments as for :func:`parse_2_13`.

    Raises:
        RuntimeError: torch_npu's answer to a bad value, key or token.
    """
    tokens = _Tokens(text.replace(" ", ""))
    _reset(values)
    index = 0
    while index < len(tokens):
        key = tokens[index]
        if settable is not None and key not in settable:
            raise RuntimeError(f"torch_npu.npu.memory._set_allocator_settings() unsupported setting: {key}")
        if key not in _HANDLERS_2_10:
            raise RuntimeError(f"Unrecognized CachingAllocator option: {key}")
        tokens.expect(index + 1, ":")
        if index + 2 >= len(tokens):
            prefix = "m_" if key in ("pin_memory_expandable_segments", "pinned_mem_register") else ""
            raise RuntimeError(f"Error, expecting {prefix}{key} value")
        _HANDLERS_2_10[key](tokens, index + 2, values)
        index = tokens.end_of_value(index) + 1
        if index < len(tokens):
            tokens.expect(index, ",")
            index += 1


def _reset(values: Values) -> None:
    """What every parse begins with."""
    values["max_split_size"] = SIZE_MAX
    values["max_non_split_rounding_size"] = values["large_segment_size"]
    values["garbage_collection_threshold"] = 0.0
    values["roundup_power2_divisions"] = (0,) * NUM_DIVISION_SLOTS


class _Tokens:
    """The string cut at ``, : [ ]``; messages name token indices."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = re.findall(r"[,:\[\]]|[^,:\[\]]+", text)

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

    def expect(self, index: int, token: str) -> None:
        """Refuse any other token than this; 2.10 only."""
        if index >= len(self) or self[index] != token:
            raise RuntimeError(f"Error parsing CachingAllocator settings, expected {token}")

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


def _max_split_size(tokens: _Tokens, index: int, values: Values) -> None:
    values["max_split_size"] = _at_least_a_large_segment(tokens, index, values, "max_split_size_mb")


def _max_non_split_rounding(tokens: _Tokens, index: int, values: Values) -> None:
    values["max_non_split_rounding_size"] = _at_least_a_large_segment(
        tokens, index, values, "max_non_split_rounding_mb"
    )


def _at_least_a_large_segment(tokens: _Tokens, index: int, values: Values, key: str) -> int:
    least_mb = values["large_segment_size"] // MIB
    size_mb = tokens.size(index)
    if size_mb < least_mb:
        raise ValueError(f"CachingAllocator option {key} too small, must be >= {least_mb}")
    return min(size_mb, SIZE_MAX // MIB) * MIB


def _large_segment_size(tokens: _Tokens, index: int, values: Values) -> None:
    size_mb = tokens.size(index)
    if size_mb <= MIN_LARGE_ALLOC_BYTES // MIB:
        raise ValueError("CachingAllocator option large_segment_size_mb must be > 10 MB")
    values["large_segment_size"] = size_mb * MIB


def _garbage_collection_threshold(tokens: _Tokens, index: int, values: Values) -> None:
    threshold = tokens.fraction(index)
    if not 0.0 < threshold < 1.0:
        raise ValueError("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
    values["garbage_collection_threshold"] = threshold


def _roundup_power2_divisions(tokens: _Tokens, index: int, values: Values) -> None:
    if tokens[index] != "[":
        num_steps = tokens.size(index)
        if not _is_power_of_two(num_steps):
            raise ValueError("For roundups, the divisions has to be power of 2 ")
        values["roundup_power2_divisions"] = (num_steps,) * NUM_DIVISION_SLOTS
        return
    divisions = [0] * NUM_DIVISION_SLOTS
    last_slot: int | None = None
    index += 1
    while tokens[index] != "]":
        num_steps = tokens.size(index + 2)
        if num_steps and not _is_power_of_two(num_steps):
            raise ValueError("For roundups, the divisions has to be power of 2 or 0 to disable roundup ")
        if tokens[index] == ">":
            for slot in range((last_slot or 0) + 1, NUM_DIVISION_SLOTS):
                divisions[slot] = num_steps
        else:
            boundary_mb = tokens.size(index)
            if not _is_power_of_two(boundary_mb):
                raise ValueError("For roundups, the intervals have to be power of 2 ")
            slot = min(boundary_mb.bit_length() - 1, NUM_DIVISION_SLOTS - 1)
            for filled in range(0 if last_slot is None else slot, slot + 1):
                divisions[filled] = num_steps
            last_slot = slot
        index += 3 if tokens[index + 3] == "]" else 4
    values["roundup_power2_divisions"] = tuple(divisions)


def _is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1


def _segment_size(tokens: _Tokens, index: int, values: Values) -> None:
    size_mb = tokens.npu_integer(index, "segment_size_mb")
    if not 20 <= size_mb <= 512:
        raise RuntimeError("CachingAllocator option segment_size_mb error, must be [20, 512], dtype is int")
    values["segment_size"] = size_mb * MIB


def _base_addr_aligned(tokens: _Tokens, index: int, values: Values) -> None:
    size_kb = tokens.npu_integer(index, "base_addr_aligned_kb")
    if size_kb > 16 or str(size_kb) != tokens[index]:
        raise RuntimeError("CachingAllocator option base_addr_aligned_kb error, must be [0~16], dtype is int")
    values["base_addr_aligned_size"] = size_kb * KIB


def _page_size(tokens: _Tokens, index: int, values: Values) -> None:
    if tokens[index] != "1g":
        raise RuntimeError(f"Unsupported page_size value: {tokens[index]}")
    values["page_size_1g"] = True


def _per_process_memory_fraction(tokens: _Tokens, index: int, values: Values) -> None:
    fraction = tokens.fraction(index)
    if not 0.0 <= fraction <= 1.0:
        raise RuntimeError("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
    values["per_process_memory_fraction"] = fraction


def _torch_boolean(name: str) -> _Handler:
    def handle(tokens: _Tokens, index: int, values: Values) -> None:
        values[name] = tokens.boolean(index)

    return handle


def _npu_boolean(name: str) -> _Handler:
    def handle(tokens: _Tokens, index: int, values: Values) -> None:
        values[name] = tokens.npu_boolean(index, name)

    return handle


def _size(name: str, unit: int) -> _Handler:
    def handle(tokens: _Tokens, index: int, values: Values) -> None:
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


def _max_split_size_2_10(tokens: _Tokens, index: int, values: Values) -> None:
    size_mb = tokens.npu_integer(index, "max_split_size_mb")
    if size_mb <= 20:
        raise RuntimeError("CachingAllocator option max_split_size_mb too small, must be > 20")
    values["max_split_size"] = size_mb * MIB


def _garbage_collection_threshold_2_10(tokens: _Tokens, index: int, values: Values) -> None:
    threshold = tokens.fraction(index)
    if threshold <= 0:
        raise RuntimeError("garbage_collect_threshold too small, set it 0.0~1.0")
    if threshold >= 1:
        raise RuntimeError("garbage_collect_threshold too big, set it 0.0~1.0")
    values["garbage_collection_threshold"] = threshold


def _roundup_power2_divisions_2_10(tokens: _Tokens, index: int, values: Values) -> None:
    if tokens[index] != "[" and tokens.size(index) == 0:
        values["roundup_power2_divisions"] = (0,) * NUM_DIVISION_SLOTS
        return
    try:
        _roundup_power2_divisions(tokens, index, values)
    except ValueError as error:
        text = str(error)
        text += "or 0 to disable roundup " if text.endswith("divisions has to be power of 2 ") else ""
        raise RuntimeError(text) from None


_HANDLERS_2_10: Final[dict[str, _Handler]] = {
    "max_split_size_mb": _max_split_size_2_10,
    "garbage_collection_threshold": _garbage_collection_threshold_2_10,
    "roundup_power2_divisions": _roundup_power2_divisions_2_10,
    "expandable_segments": _npu_boolean("expandable_segments"),
    "pinned_use_background_threads": _npu_boolean("pinned_use_background_threads"),
} | {
    key: _NPU_HANDLERS[key]
    for key in (
        "segment_size_mb",
        "base_addr_aligned_kb",
        "page_size",
        "per_process_memory_fraction",
        "multi_stream_lazy_reclaim",
        "pin_memory_expandable_segments",
        "pinned_mem_register",
        "pinned_reserve_segment_size_mb",
    )
}
