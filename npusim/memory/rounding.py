"""Sizes: from a request to its block, from a block to the segment that the device is asked for."""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3

MIN_BLOCK_BYTES: Final = 512
SMALL_BYTES: Final = MIB
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_SEGMENT_BYTES: Final = 20 * MIB
MIN_LARGE_ALLOC_BYTES: Final = 10 * MIB
ROUND_LARGE_BYTES: Final = 2 * MIB
EXTRA_LARGE_PAGE_BYTES: Final = GIB
PAD_BYTES: Final = 32
MAX_REQUEST_BYTES: Final = 2**60
"""All exact: NPUCachingAllocator.h of torch_npu 2.13.0; every one can be read off the recorded traces."""

_POW2_FIRST_SLOT: Final = 20
_POW2_NUM_SLOTS: Final = 16


def pad_bytes(soc: str, cann_version: str) -> int:
    """Bytes that torch_npu adds to each request: 0 on Ascend950 with CANN 9.1.0 or later, else 32.

    Grade exact: recorded from torch_npu 2.13.0 for 41 pairs of SoC and CANN version.

    Args:
        soc: Name as ``torch.npu.get_device_name()`` has it, e.g. ``Ascend910B3``.
        cann_version: E.g. ``8.5.0`` or ``9.0.0.beta1``; empty if it cannot be read.
    """
    version = re.match(r"(\d+)\.(\d+)", cann_version)
    at_least_9_1 = version is not None and (int(version[1]), int(version[2])) >= (9, 1)
    return 0 if soc.startswith("Ascend950") and at_least_9_1 else PAD_BYTES


def round_up(num_bytes: int, multiple: int) -> int:
    """The smallest multiple that is not below ``num_bytes``."""
    return -(-num_bytes // multiple) * multiple


def round_to_power_of_two_division(padded_bytes: int, divisions: tuple[int, ...]) -> int:
    """Block size of a request (with its pad) under ``roundup_power2_divisions``.

    Args:
        padded_bytes: Request plus pad.
        divisions: Steps between two powers of two; slot i is for sizes in [2^(20+i), 2^(21+i)), the first slot also for
            all below and the last for all above; 0 and 1 switch the option off.
    """
    exponent = padded_bytes.bit_length() - 1
    num_steps = divisions[min(max(exponent - _POW2_FIRST_SLOT, 0), _POW2_NUM_SLOTS - 1)]
    if num_steps > 1 and padded_bytes > MIN_BLOCK_BYTES * num_steps:
        return round_up(padded_bytes, (1 << exponent) // num_steps)
    return round_up(padded_bytes, MIN_BLOCK_BYTES)


def segment_bytes(block_bytes: int, *, is_small: bool, large_segment_bytes: int, page_1g: bool) -> int:
    """What the device is asked for to serve a block of ``block_bytes`` (rounded) when no cached block fits.

    Args:
        block_bytes: Rounded block size.
        is_small: The pool is the small one.
        large_segment_bytes: Segment of blocks between 1 MiB and 10 MiB (``large_segment_size_mb``).
        page_1g: ``page_size:1g`` is set and supported.
    """
    if page_1g and not is_small:
        return round_up(block_bytes, EXTRA_LARGE_PAGE_BYTES)
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_LARGE_ALLOC_BYTES:
        return large_segment_bytes
    return round_up(block_bytes, ROUND_LARGE_BYTES)
