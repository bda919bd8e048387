"""Where the releases of torch_npu that are modelled differ in their allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class AllocatorVersion:
    """Behaviour of one release. Grade exact: read in its sources, and for 2.13 recorded from its wheel too.

    Attributes:
        name: The release.
        extra_counters: ``memory_stats`` has num_sync_all_streams, num_device_alloc and _free, num_oom_rejections.
        capture_by_scope: Any open pool scope counts as a graph capture, so events wait and memory is not given back.
        innermost_scope_first: Of several open scopes that match, the one opened last gets the request.
        pool_id_in_traces: Trace entries have a ``pool_id``.
    """

    name: str
    extra_counters: bool
    capture_by_scope: bool
    innermost_scope_first: bool
    pool_id_in_traces: bool


VERSIONS: Final = {
    "2.13": AllocatorVersion("2.13", True, False, True, True),
    "2.10": AllocatorVersion("2.10", False, True, False, False),
}
