"""Programs on npusim's allocator."""

from __future__ import annotations

from typing import Any

from npusim.device.event_log import EventLog
from npusim.device.faults import OtherProcess
from npusim.device.hbm import Hbm
from npusim.device.ledger import Ledger, LedgerFullError
from npusim.memory.caching_allocator import CachingAllocator
from npusim.memory.config import parse_allocator_config
from npusim.memory.driver import ManualStreamDriver
from npusim.memory.out_of_memory import OutOfMemoryError
from npusim.memory.rounding import pad_bytes
from npusim.memory.uncached import UncachedMemory
from tests.oracle.target import ERRORS, SKIPPED, Program, Recording, Target, described

CANN_VERSION = "9.1.0"


def run_on_model(program: Program) -> Recording:
    """Carry out a program on npusim."""
    try:
        model = Model(program)
    except ERRORS as error:
        return Recording(error=described(error))
    return model.run(program)


class Model(Target):
    """npusim's allocator on a device of its own."""

    def __init__(self, program: Program) -> None:
        self.log = EventLog(keep=True)
        self.ledger = Ledger(program.total_bytes)
        self.others = OtherProcess(self.ledger, "others")
        self.hbm = Hbm(self.ledger, self.log)
        self.driver = ManualStreamDriver()
        pad = pad_bytes(program.soc, CANN_VERSION)
        self.allocator = CachingAllocator(self.hbm, self.driver, parse_allocator_config(program.conf), pad_bytes=pad)
        self.tensor_memory: CachingAllocator | UncachedMemory = self.allocator
        if not program.caching:
            self.tensor_memory = UncachedMemory(
                self.hbm, self.driver, self.allocator, pad_bytes=pad, out_of_memory_error=OutOfMemoryError
            )
        self.allocator.record_memory_history(context=None)
        self.observed: list[list[int]] = []
        self.allocator.out_of_memory_observers.append(lambda *numbers: self.observed.append(list(numbers)))
        self.addresses: dict[int, int] = {}
        self.pools: dict[str, tuple[int, int]] = {}
        self.graphs: dict[str, tuple[int, int]] = {}
        self.num_pools = self.num_graphs = 0
        self.captured_stream: int | None = None
        self.take_calls()

    def allocate(self, key: int, num_bytes: int) -> Any:
        return self._allocate(self.tensor_memory, key, num_bytes, self.driver.stream)

    def allocate_on(self, key: int, num_bytes: int, stream: int) -> Any:
        return self._allocate(self.allocator, key, num_bytes, stream)

    def _allocate(self, memory: CachingAllocator | UncachedMemory, key: int, num_bytes: int, stream: int) -> Any:
        self.observed.clear()
        try:
            self.addresses[key] = memory.malloc(num_bytes, stream)
        except OutOfMemoryError as error:
            return [described(error), *self.observed]
        return self.addresses[key]

    def free(self, key: int) -> Any:
        if key not in self.addresses:
            return SKIPPED
        return self.tensor_memory.free(self.addresses.pop(key))

    def record_stream(self, key: int, stream: int) -> Any:
        if not self.addresses.get(key):
            return SKIPPED
        return self.tensor_memory.record_stream(self.addresses[key], stream)

    def erase_stream(self, key: int, stream: int) -> Any:
        if not self.addresses.get(key):
            return SKIPPED
        return self.tensor_memory.erase_stream(self.addresses[key], stream)

    def set_stream(self, stream: int) -> Any:
        self.driver.stream = stream
        self.driver.capturing = stream == self.captured_stream

    def hold_events(self, held: bool) -> Any:
        self.driver.held = held

    def complete(self, stream: int) -> Any:
        self.driver.complete(stream)

    def empty_cache(self) -> Any:
        self.allocator.empty_cache()

    def empty_virt_addr_cache(self) -> Any:
        self.allocator.empty_virt_addr_cache()

    def reset_peaks(self) -> Any:
        self.allocator.reset_peak_memory_stats()

    def reset_accumulated(self) -> Any:
        self.allocator.reset_accumulated_memory_stats()

    def set_fraction(self, fraction: float) -> Any:
        self.allocator.set_per_process_memory_fraction(fraction)

    def get_fraction(self) -> Any:
        return self.allocator.get_per_process_memory_fraction()

    def mem_get_info(self) -> Any:
        return list(self.hbm.mem_get_info())

    def change_settings(self, text: str) -> Any:
        self.allocator.set_allocator_settings(text)

    def fail_next(self, num_skipped: int) -> Any:
        self.hbm.faults.fail_next(num_skipped)

    def resize_others(self, num_bytes: int) -> Any:
        try:
            self.others.resize(num_bytes)
        except LedgerFullError:
            return "no room"
        return None

    def create_pool(self, name: str, use_on_oom: bool, no_split: bool) -> Any:
        self.num_pools += 1
        self.pools[name] = (0, self.num_pools)
        self.allocator.create_pool(self.pools[name], use_on_oom=use_on_oom, no_split=no_split)
        return list(self.pools[name])

    def begin_pool(self, name: str) -> Any:
        if name not in self.pools:
            return SKIPPED
        return self.allocator.begin_allocate_to_pool(self.pools[name])

    def end_pool(self, name: str) -> Any:
        if name not in self.pools:
            return SKIPPED
        self.allocator.end_allocate_to_pool(self.pools[name])
        return self.allocator.release_pool(self.pools[name])

    def destroy_pool(self, name: str) -> Any:
        if name not in self.pools:
            return SKIPPED
        return self.allocator.destroy_pool(self.pools.pop(name))

    def begin_capture(self, name: str, pool: str) -> Any:
        captured = self.driver.stream
        if self.captured_stream is not None or not captured or (pool and pool not in self.graphs):
            return SKIPPED
        if pool:
            self.graphs[name] = self.graphs[pool]
        else:
            self.num_graphs += 1
            self.graphs[name] = (self.num_graphs, 0)
        self.allocator.begin_allocate_to_pool(self.graphs[name], lambda stream: stream == captured)
        self.allocator.mark_capture_begin()
        self.captured_stream, self.driver.capturing = captured, True
        return list(self.graphs[name])

    def end_capture(self, name: str) -> Any:
        if name not in self.graphs or self.driver.stream != self.captured_stream:
            return SKIPPED
        self.captured_stream, self.driver.capturing = None, False
        self.allocator.mark_capture_end()
        return self.allocator.end_allocate_to_pool(self.graphs[name])

    def reset_graph(self, name: str) -> Any:
        if name not in self.graphs or self.captured_stream is not None:
            return SKIPPED
        return self.allocator.release_pool(self.graphs.pop(name))

    def stats(self) -> dict[str, int]:
        return self.allocator.memory_stats()

    def take_calls(self) -> list[list[Any]]:
        assert self.log.events is not None
        calls = [[name.removeprefix("hbm."), *numbers] for name, _, *numbers in self.log.events]
        self.log.events.clear()
        return calls

    def segments(self) -> list[dict[str, Any]]:
        return [dict(segment) for segment in self.allocator.snapshot()]

    def history(self) -> list[list[Any]]:
        return [
            [entry.action, entry.address, entry.size, entry.stream, list(entry.pool_id)]
            for entry in self.allocator.history.entries
        ]

    def summary(self) -> str:
        return self.allocator.memory_summary()
