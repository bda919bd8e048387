"""``PYTORCH_NPU_ALLOC_CONF``: the settings of the caching allocator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from npusim.memory.config_parser import NUM_DIVISION_SLOTS, SIZE_MAX, Values, parse_2_10, parse_2_13
from npusim.memory.rounding import KIB, LARGE_SEGMENT_BYTES
from npusim.memory.versions import VERSIONS

_SETTABLE_AT_RUN_TIME: Final = {
    "2.10": frozenset({"expandable_segments"}),
    "2.13": frozenset(
        {
            "expandable_segments", "max_split_size_mb", "max_non_split_rounding_mb", "release_lock_on_npumalloc",
            "throw_on_npumalloc_oom", "per_process_memory_fraction", "pinned_max_round_threshold_mb",
            "pinned_max_cached_size_mb",
        }
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings of the caching allocator; sizes in bytes, :data:`SIZE_MAX` where unlimited."""

    max_split_size: int = SIZE_MAX
    max_non_split_rounding_size: int = LARGE_SEGMENT_BYTES
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_DIVISION_SLOTS
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
    def from_environment(cls, environment: Mapping[str, str], version: str = "2.13") -> AllocatorConfig:
        """The configuration that torch_npu would read from these environment variables.

        Raises:
            RuntimeError: Both variables are set, or as :func:`parse_allocator_config`.
            ValueError: As :func:`parse_allocator_config`.
        """
        text = environment.get("PYTORCH_NPU_ALLOC_CONF")
        if VERSIONS[version].reads_torch_conf and "PYTORCH_ALLOC_CONF" in environment:
            if text is not None:
                raise RuntimeError(
                    "Both PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF have been set, please set only one of them."
                )
            text = environment["PYTORCH_ALLOC_CONF"]
        return parse_allocator_config(text or "", version=version)


def parse_allocator_config(text: str, base: AllocatorConfig | None = None, *, version: str = "2.13") -> AllocatorConfig:
    """Read a ``key:value,key:value`` string.

    Args:
        text: E.g. ``expandable_segments:True,base_addr_aligned_kb:8``; empty: nothing changes.
        base: What is in force so far. Options that torch resets on each parse (max_split_size_mb,
            max_non_split_rounding_mb, garbage_collection_threshold, roundup_power2_divisions) do not carry over.
        version: Release of torch_npu whose rules and texts count.

    Raises:
        ValueError: Where torch_npu raises it, with its text; likewise RuntimeError.
    """
    config, refusal = _parse(text, base if base is not None else AllocatorConfig(), version, settable=None)
    if refusal is not None:
        raise refusal
    return config


def change_allocator_settings(
    text: str, base: AllocatorConfig, *, version: str = "2.13"
) -> tuple[AllocatorConfig, Exception | None]:
    """As ``torch_npu.npu.memory._set_allocator_settings``: a parse, but only of options that can change at run time.

    Returns:
        The settings in force from now on, and the ValueError or RuntimeError to be raised, or None. A string with a bad
        value counts as far as it was read; one with a bad key does not count at all in 2.13.
    """
    return _parse(text, base, version, settable=_SETTABLE_AT_RUN_TIME[version])


def _parse(
    text: str, base: AllocatorConfig, version: str, settable: frozenset[str] | None
) -> tuple[AllocatorConfig, Exception | None]:
    if not text:
        return base, None
    values: Values = {"large_segment_size": base.large_segment_size}
    parse = parse_2_10 if version == "2.10" else parse_2_13
    refusal: Exception | None = None
    try:
        parse(text, values, settable)
    except (RuntimeError, ValueError) as error:
        refusal = error
    config = replace(base, **values)
    limited = config.max_split_size != SIZE_MAX or config.garbage_collection_threshold != 0
    if refusal is None and config.expandable_segments and limited:
        refusal = RuntimeError(
            "`max_split_size_mb` or `garbage_collection_threshold`, cannot be enabled with "
            "`expandable_segments`, please set `expandable_segments` to `False`."
        )
    return config, refusal
