"""Random programs for the allocator.

What torch_npu does in no order of its own is left out, since no model can foretell it:

* Which of several streams' events it looks at first (a hash map by stream): all programs record uses on one stream.
* Which of several pools that nobody holds it empties first (another hash map): a program that makes several pools
  destroys them one at a time, and a graph's pool is emptied at once.

Also left out is where it works on memory that it has let go of already:

* During a capture it remembers uses of streams by the address of its block objects, which outlives them: no program
  records a use during a capture.
* With expandable segments it forgets a pool that still has live blocks, once all of its mapped ranges were unmapped as
  often as it grew: a pool is destroyed, or its graph reset, only when its blocks are freed.
* With ``max_split_size_mb`` it gives parts of segments back to the device, if larger blocks were split before, or pages
  are of 1 GiB: programs set it before they allocate, and not with such pages.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.oracle.target import Program

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NUM_OPERATIONS = 500
CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "expandable_segments:True,base_addr_aligned_kb:0",
    "garbage_collection_threshold:0.5",
    "roundup_power2_divisions:[1:2,4:8,>:4]",
    "expandable_segments:True,segment_size_mb:32",
    "multi_stream_lazy_reclaim:True",
    "page_size:1g",
    "large_segment_size_mb:16",
    "expandable_segments:True,multi_stream_lazy_reclaim:True",
    "throw_on_npumalloc_oom:True,per_process_memory_fraction:0.8",
    "garbage_collection_threshold:0.7,max_split_size_mb:40",
    "expandable_segments:True,page_size:1g",
    "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "expandable_segments:True,large_segment_size_mb:64",
    "roundup_power2_divisions:4",
    "expandable_segments:True,roundup_power2_divisions:8,base_addr_aligned_kb:7",
    "per_process_memory_fraction:0.5",
    "expandable_segments:True,throw_on_npumalloc_oom:True",
)
FIRST_CHANGES = ("max_split_size_mb:32", "max_split_size_mb:48,max_non_split_rounding_mb:30")
CHANGES = (
    "expandable_segments:True",
    "expandable_segments:False",
    "throw_on_npumalloc_oom:True",
    "throw_on_npumalloc_oom:False",
    "per_process_memory_fraction:0.6",
    "garbage_collection_threshold:0.5",
    "max_split_size_mb:5",
    "no_such_key:1",
)


def program(seed: int, num_operations: int = NUM_OPERATIONS) -> Program:
    """The program of a seed; a number of seeds in a row covers the configurations."""
    return _Author(seed).write(num_operations)


class _Author:
    """Writes a program, and keeps in mind what of it is alive."""

    def __init__(self, seed: int) -> None:
        self.choices = random.Random(seed)
        self.conf = CONFIGURATIONS[seed % len(CONFIGURATIONS)]
        self.total_bytes = self.choices.choice((256 * MIB, GIB, 4 * GIB))
        if "page_size" in self.conf:
            self.total_bytes = 8 * GIB
        self.soc = self.choices.choice(("Ascend910B3", "Ascend910B3", "Ascend950"))
        self.operations: list[list[Any]] = []
        self.live: dict[int, str] = {}  # keys, and the pool that each was allocated in, if any
        self.tensors: list[int] = []
        self.num_keys = self.num_names = 0
        self.stream = 0
        self.event_stream = self.choices.randrange(3)
        self.pools: list[str] = []
        self.open_pools: list[str] = []
        self.graphs: list[str] = []
        self.capture = ""
        self.draw_size = self.choices.choice((self.small_size, self.any_size, self.any_size, self.large_size))
        self.max_live = self.choices.choice((20, 80, 300))

    def write(self, num_operations: int) -> Program:
        common: list[tuple[Callable[[], None], float]] = [
            (self.allocate, 45),
            (self.free, 38),
            (self.empty_cache, 1),
            (lambda: self.add("mem_get_info"), 1),
            (lambda: self.add("reset_peaks"), 0.5),
            (lambda: self.add("reset_accumulated"), 0.5),
            (lambda: self.add("get_fraction"), 0.2),
        ]
        topics: list[list[tuple[Callable[[], None], float]]] = [
            [(self.switch_stream, 6)],
            [(self.switch_stream, 4), (self.record_stream, 8), (self.erase_stream, 1), (self.steer_events, 3)],
            [(self.limit, 1)],
            [(self.change_settings, 1)],
            [(lambda: self.add("fail_next", self.choices.randrange(4)), 1.5)],
            [(lambda: self.add("resize_others", self.choices.randrange(0, self.total_bytes // 2)), 1)],
            [(self.create_pool, 0.7), (self.switch_pool, 3), (self.destroy_pool, 0.5), (self.switch_stream, 2)],
            [(self.switch_capture, 3), (self.reset_graph, 0.6), (self.switch_stream, 2)],
            [(lambda: self.add("empty_virt_addr_cache"), 0.7)],
        ]
        menu = common + [entry for topic in topics if self.choices.random() < 0.4 for entry in topic]
        if "garbage_collection" in self.conf:  # it needs a limit
            self.add("set_fraction", self.choices.choice((0.3, 0.6)))
        if "page_size" not in self.conf and self.choices.random() < 0.1:
            self.add("change_settings", self.choices.choice(FIRST_CHANGES))
        actions, weights = zip(*menu, strict=True)
        while len(self.operations) < num_operations:
            self.choices.choices(actions, weights)[0]()
        return Program(self.operations, self.conf, self.soc, self.total_bytes)

    def add(self, name: str, *arguments: Any) -> None:
        self.operations.append([name, *arguments])

    def new_name(self, kind: str) -> str:
        self.num_names += 1
        return f"{kind}{self.num_names}"

    # Memory

    def small_size(self) -> int:
        return self.choices.randrange(0, self.choices.choice((600, 5000, 100 * KIB)))

    def large_size(self) -> int:
        return self.choices.randrange(MIB, self.total_bytes // self.choices.choice((4, 16, 64)))

    def any_size(self) -> int:
        edge = self.choices.choice((512, 4 * KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB, 64 * MIB))
        near_it = edge + self.choices.choice((-33, -32, -31, 0, 1, 512)) if self.choices.random() < 0.3 else 0
        return near_it or self.choices.randrange(1, edge)

    def allocate(self) -> None:
        if len(self.live) > self.max_live:
            return self.free()
        self.num_keys += 1
        size = self.draw_size()
        if not self.capture and self.choices.random() < 0.1:
            self.add("allocate_on", self.num_keys, size, self.choices.randrange(3))
        else:
            self.add("allocate", self.num_keys, size)
            self.tensors.append(self.num_keys)
        self.live[self.num_keys] = self.capture or (self.open_pools[-1] if self.open_pools else "")
        return None

    def free(self) -> None:
        if self.live:
            self.release(self.choices.choice(list(self.live)))

    def release(self, key: int) -> None:
        del self.live[key]
        if key in self.tensors:
            self.tensors.remove(key)
        self.add("free", key)

    def empty_cache(self) -> None:
        self.add("empty_cache")

    # Streams

    def switch_stream(self) -> None:
        if not self.capture:
            self.stream = self.choices.randrange(3)
            self.add("set_stream", self.stream)

    def record_stream(self) -> None:
        if self.tensors and not self.capture:
            self.add("record_stream", self.choices.choice(self.tensors), self.event_stream)

    def erase_stream(self) -> None:
        if self.tensors and not self.capture:
            self.add("erase_stream", self.choices.choice(self.tensors), self.event_stream)

    def steer_events(self) -> None:
        if self.choices.random() < 0.5:
            self.add("complete", self.event_stream)
        else:
            self.add("hold_events", self.choices.random() < 0.7)

    # Settings

    def limit(self) -> None:
        self.add("set_fraction", self.choices.choice((0.2, 0.5, 0.9, 1.0, 1.5)))

    def change_settings(self) -> None:
        self.add("change_settings", self.choices.choice(CHANGES))

    # Pools and graphs

    def create_pool(self) -> None:
        name = self.new_name("pool")
        self.pools.append(name)
        self.add("create_pool", name, self.choices.random() < 0.3, self.choices.random() < 0.2)

    def switch_pool(self) -> None:
        if self.open_pools and self.choices.random() < 0.5:
            self.add("end_pool", self.open_pools.pop())
        elif closed := [name for name in self.pools if name not in self.open_pools]:
            self.open_pools.append(self.choices.choice(closed))
            self.add("begin_pool", self.open_pools[-1])

    def destroy_pool(self) -> None:
        closed = [name for name in self.pools if name not in self.open_pools]
        if closed and not self.capture:  # waits for the device, which ends the process during a capture
            name = self.choices.choice(closed)
            self.pools.remove(name)
            self.release_all_of(name)
            self.add("destroy_pool", name)

    def switch_capture(self) -> None:
        if self.capture:
            self.add("end_capture", self.capture)
            self.capture = ""
        elif self.stream and not self.open_pools:
            shared = self.choices.choice(self.graphs) if self.graphs and self.choices.random() < 0.3 else ""
            self.capture = self.new_name("graph")
            self.graphs.append(self.capture)
            self.add("begin_capture", self.capture, shared)

    def reset_graph(self) -> None:
        if self.graphs and not self.capture:
            name = self.choices.choice(self.graphs)
            self.graphs.remove(name)
            self.release_all_of(name)
            self.add("reset_graph", name)
            self.empty_cache()

    def release_all_of(self, pool: str) -> None:
        for key in [key for key, owner in self.live.items() if owner == pool]:
            self.release(key)
