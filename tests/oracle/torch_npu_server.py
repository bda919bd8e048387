"""Programs on the real torch_npu, under the stub CANN: reads one from each line of standard input, writes recordings.

Each program runs in a child of this process, since torch_npu reads its settings once. The children inherit the imports,
which take seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # torch_npu prints to standard output

import torch  # noqa: E402
import torch_npu  # noqa: E402
from torch_npu import _C  # noqa: E402

from tests.oracle.target import ERRORS, SKIPPED, Program, Recording, Target, described  # noqa: E402

NUM_STREAMS = 4

acl = ctypes.CDLL("libascendcl.so")
for name, result, arguments in (
    ("complete", None, [ctypes.c_void_p]),
    ("drain", ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t]),
    ("fail_next", None, [ctypes.c_uint64]),
    ("hold_events", None, [ctypes.c_int]),
    ("read_environment", None, []),
    ("record", None, [ctypes.c_int]),
    ("set_others_bytes", None, [ctypes.c_uint64]),
    ("total_bytes", ctypes.c_uint64, []),
    ("used_bytes", ctypes.c_uint64, [ctypes.c_int]),
):
    function = getattr(acl, f"stubcann_{name}")
    function.restype, function.argtypes = result, arguments


class TorchNpu(Target):
    """torch_npu's allocator, in a process that uses it for nothing else."""

    def __init__(self, program: Program) -> None:
        if program.conf:
            os.environ["PYTORCH_NPU_ALLOC_CONF"] = program.conf
        os.environ["PYTORCH_NO_NPU_MEMORY_CACHING"] = str(int(not program.caching))
        os.environ["TASK_QUEUE_ENABLE"] = "0"
        os.environ["STUBCANN_HBM_BYTES"] = str(program.total_bytes)
        os.environ["STUBCANN_SOC"] = program.soc
        acl.stubcann_read_environment()
        torch.npu.set_device(0)
        self.streams = [torch.npu.default_stream(), *(torch.npu.Stream() for _ in range(NUM_STREAMS - 1))]
        self.stream_numbers = {stream.npu_stream: number for number, stream in enumerate(self.streams)}
        self.stream_numbers[0] = 0
        _C._npu_record_memory_history("all", None, "python", sys.maxsize)
        self.observed: list[list[int]] = []
        _C._npu_attach_out_of_memory_observer(lambda *numbers: self.observed.append(list(numbers)))
        self.held: dict[int, Any] = {}
        self.pools: dict[str, Any] = {}
        self.graphs: dict[str, Any] = {}
        self.graph_pools: dict[str, tuple[int, int]] = {}
        self.num_graph_pools = 0
        self.capturing = ""
        acl.stubcann_record(1)

    def allocate(self, key: int, num_bytes: int) -> Any:
        self.observed.clear()
        try:
            self.held[key] = torch.empty(num_bytes, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError as error:
            return [described(error), *self.observed]
        return self.held[key].data_ptr()

    def allocate_on(self, key: int, num_bytes: int, stream: int) -> Any:
        self.observed.clear()
        try:
            self.held[key] = _C._npu_npuCachingAllocator_raw_alloc(num_bytes, self.streams[stream].npu_stream)
        except torch.OutOfMemoryError as error:
            return [described(error), *self.observed]
        return self.held[key]

    def free(self, key: int) -> Any:
        if key not in self.held:
            return SKIPPED
        holding = self.held.pop(key)
        if isinstance(holding, int):
            _C._npu_npuCachingAllocator_raw_delete(holding)
        return None

    def record_stream(self, key: int, stream: int) -> Any:
        tensor = self._tensor(key)
        return SKIPPED if tensor is None else tensor.record_stream(self.streams[stream])

    def erase_stream(self, key: int, stream: int) -> Any:
        tensor = self._tensor(key)
        return SKIPPED if tensor is None else torch_npu.npu.utils._erase_stream(tensor, self.streams[stream])

    def set_stream(self, stream: int) -> Any:
        torch.npu.set_stream(self.streams[stream])

    def hold_events(self, held: bool) -> Any:
        acl.stubcann_hold_events(held)

    def complete(self, stream: int) -> Any:
        acl.stubcann_complete(self.streams[stream].npu_stream)

    def empty_cache(self) -> Any:
        torch.npu.empty_cache()

    def empty_virt_addr_cache(self) -> Any:
        torch.npu.memory.empty_virt_addr_cache()

    def reset_peaks(self) -> Any:
        torch.npu.reset_peak_memory_stats()

    def reset_accumulated(self) -> Any:
        torch.npu.reset_accumulated_memory_stats()

    def set_fraction(self, fraction: float) -> Any:
        torch.npu.set_per_process_memory_fraction(fraction)

    def get_fraction(self) -> Any:
        return torch.npu.get_per_process_memory_fraction()

    def mem_get_info(self) -> Any:
        return list(torch.npu.mem_get_info())

    def change_settings(self, text: str) -> Any:
        torch.npu.memory._set_allocator_settings(text)

    def fail_next(self, num_skipped: int) -> Any:
        acl.stubcann_fail_next(num_skipped)

    def resize_others(self, num_bytes: int) -> Any:
        if num_bytes + acl.stubcann_used_bytes(0) > acl.stubcann_total_bytes():
            return "no room"
        return acl.stubcann_set_others_bytes(num_bytes)

    def create_pool(self, name: str, use_on_oom: bool, no_split: bool) -> Any:
        self.pools[name] = torch.npu.MemPool(use_on_oom=use_on_oom, no_split=no_split)
        return list(self.pools[name].id)

    def begin_pool(self, name: str) -> Any:
        if name not in self.pools:
            return SKIPPED
        return _C._npu_beginAllocateCurrentThreadToPool(0, self.pools[name].id)

    def end_pool(self, name: str) -> Any:
        if name not in self.pools:
            return SKIPPED
        _C._npu_endAllocateToPool(0, self.pools[name].id)
        return _C._npu_releasePool(0, self.pools[name].id)

    def destroy_pool(self, name: str) -> Any:
        if name not in self.pools:
            return SKIPPED
        del self.pools[name]
        return None

    def begin_capture(self, name: str, pool: str) -> Any:
        if self.capturing or torch.npu.current_stream() == self.streams[0] or (pool and pool not in self.graphs):
            return SKIPPED
        if pool:
            self.graph_pools[name] = self.graph_pools[pool]
        else:
            self.num_graph_pools += 1
            self.graph_pools[name] = (self.num_graph_pools, 0)
        self.graphs[name] = torch.npu.NPUGraph()
        self.graphs[name].capture_begin(self.graph_pools[pool] if pool else None)
        self.capturing = name
        return list(self.graph_pools[name])

    def end_capture(self, name: str) -> Any:
        if name != self.capturing or not torch.npu.is_current_stream_capturing():
            return SKIPPED
        self.graphs[name].capture_end()
        self.capturing = ""
        return None

    def reset_graph(self, name: str) -> Any:
        if name not in self.graphs or self.capturing:
            return SKIPPED
        return self.graphs.pop(name).reset()

    def stats(self) -> dict[str, int]:
        return dict(torch.npu.memory_stats())

    def take_calls(self) -> list[list[Any]]:
        capacity = acl.stubcann_drain(None, 0)
        buffer = ctypes.create_string_buffer(capacity + 1)
        acl.stubcann_drain(buffer, capacity)
        calls = []
        for line in buffer.value.decode().splitlines():
            name, *words = line.split()
            numbers = [int(word, 0) for word in words if word != "oom"]
            if words[-1] == "oom" and name == "phys_malloc":
                name = "phys_malloc_oom"
            elif words[-1] == "oom":
                numbers[0] = None
            calls.append([name, *numbers])
        return calls

    def segments(self) -> list[dict[str, Any]]:
        segments = _C._npu_memorySnapshot(None)["segments"]
        for segment in segments:
            segment["stream"] = self.stream_numbers[segment["stream"]]
        return segments

    def history(self) -> list[list[Any]]:
        return [
            [
                entry["action"],
                entry.get("addr", entry.get("device_free")),
                entry["size"],
                self.stream_numbers[entry["stream"]],
                list(entry["pool_id"]),
            ]
            for entry in _C._npu_memorySnapshot(None)["device_traces"][0]
        ]

    def summary(self) -> str:
        return torch.npu.memory_summary()

    def _tensor(self, key: int) -> torch.Tensor | None:
        holding = self.held.get(key)
        return holding if isinstance(holding, torch.Tensor) and holding.data_ptr() else None


def run(program: Program) -> Recording:
    """Carry out a program; only once in a process."""
    try:
        target = TorchNpu(program)
    except ERRORS as error:
        return Recording(error=described(error))
    return target.run(program)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answers.write(run(Program(**json.loads(line))).to_json() + "\n")
            answers.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            died = Recording(error=f"the process died with status {os.waitstatus_to_exitcode(status)}")
            answers.write(died.to_json() + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
