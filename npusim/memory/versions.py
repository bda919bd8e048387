"""Where the releases of torch_npu that are modelled differ in their allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class AllocatorVersion:
    """Behaviour of one release. Grade exact: read in its sources, and for 2.13 recorded from its wheel too.

    Attributes:
        name: The release.
        reads_torch_conf: ``PYTORCH_ALLOC_CONF`` counts too.
        extra_counters: ``memory_stats`` has num_sync_all_streams, num_device_alloc and _free, num_oom_rejections.
        capture_by_scope: Any open pool scope counts as a graph capture: events wait, a full device is not tried again,
            and giving cached memory back is an error.
        innermost_scope_first: Of several open scopes that match, the one opened last gets the request.
        pool_allocator_frees: Segments made by a ``MemPool``'s own allocator go back to it, not to the device.
        pool_id_in_traces: Trace entries have a ``pool_id``.
    """

    name: str
    reads_torch_conf: bool
    extra_counters: bool
    capture_by_scope: bool
    innermost_scope_first: bool
    pool_allocator_frees: bool
    pool_id_in_traces: bool


VERSIONS: Final = {
    "2.13": AllocatorVersion(
        name="2.13",
        reads_torch_conf=True,
        extra_counters=True,
        capture_by_scope=False,
        innermost_scope_first=True,
        pool_allocator_frees=True,
        pool_id_in_traces=True,
    ),
    "2.10": AllocatorVersion(
        name="2.10",
        reads_torch_conf=False,
        extra_counters=False,
        capture_by_scope=True,
        innermost_scope_first=False,
        pool_allocator_frees=False,
        pool_id_in_traces=False,
    ),
}
