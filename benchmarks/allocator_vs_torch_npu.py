"""Speed of the allocator model beside the real one of torch_npu, called from Python on the stub CANN.

Run ``python benchmarks/allocator_vs_torch_npu.py`` in the environment of docs/oracle.md, in the project's root.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from allocator import NUM_PAIRS, NUM_ROUNDS, any_size, few_sizes, make_allocator, model_like_trace  # noqa: E402

Malloc = Callable[[int, int], int]
Free = Callable[[int], None]
Speeds = dict[str, float]

CONFIGURATIONS = ("", "expandable_segments:True")
HBM_BYTES = 96 << 30


def pairs_per_second(malloc: Malloc, free: Free, stream: int, num_live: int, draw: Callable[..., int]) -> float:
    """The best of several rounds, each replacing random ones of ``num_live`` blocks."""
    choices = random.Random(num_live)
    live = [malloc(draw(choices), stream) for _ in range(num_live)]
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        indices = [choices.randrange(num_live) for _ in range(NUM_PAIRS)]
        sizes = [draw(choices) for _ in range(NUM_PAIRS)]
        start = time.process_time()
        for index, size in zip(indices, sizes, strict=True):
            free(live[index])
            live[index] = malloc(size, stream)
        best = min(best, time.process_time() - start)
    for address in live:
        free(address)
    return NUM_PAIRS / best


def trace_pairs_per_second(malloc: Malloc, free: Free, stream: int, trace: list[tuple[int, int]]) -> float:
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        addresses: dict[int, int] = {}
        start = time.process_time()
        for key, size in trace:
            if size:
                addresses[key] = malloc(size, stream)
            else:
                free(addresses.pop(key))
        best = min(best, time.process_time() - start)
        for address in addresses.values():
            free(address)
    return len(trace) / 2 / best


def measure(malloc: Malloc, free: Free, stream: int) -> Speeds:
    """Pairs of allocation and free per second by workload."""
    speeds = {}
    for exponent in range(3, 6):
        for name, draw in (("five sizes", few_sizes), ("any size", any_size)):
            workload = f"{10**exponent:,} live blocks, {name}"
            speeds[workload] = pairs_per_second(malloc, free, stream, 10**exponent, draw)
    trace = model_like_trace()
    speeds[f"trace of {len(trace):,} operations"] = trace_pairs_per_second(malloc, free, stream, trace)
    return speeds


def measure_torch_npu() -> Speeds:
    """In a process under the stub."""
    import torch
    import torch_npu

    torch.npu.set_device(0)
    native = torch_npu._C
    stream = torch.npu.current_stream().npu_stream
    return measure(native._npu_npuCachingAllocator_raw_alloc, native._npu_npuCachingAllocator_raw_delete, stream)


def ask_torch_npu(conf: str) -> Speeds:
    from tests.stubcann.build import environment

    settings = {"PYTORCH_NPU_ALLOC_CONF": conf} if conf else {}
    settings |= {"STUBCANN_HBM_BYTES": str(HBM_BYTES), "TASK_QUEUE_ENABLE": "0"}
    child = subprocess.run(
        [sys.executable, __file__, "--torch-npu"], env=environment() | settings, stdout=subprocess.PIPE, check=True
    )
    speeds: Speeds = json.loads(child.stdout.splitlines()[-1])
    return speeds


def main() -> None:
    if "--torch-npu" in sys.argv:
        print(json.dumps(measure_torch_npu()), flush=True)
        os._exit(0)  # without torch_npu's threads taking leave of a device that is none
    print(f"{'configuration':<26}{'workload':<34}{'npusim':>10}{'torch_npu':>11}{'ratio':>7}   pairs/s")
    for conf in CONFIGURATIONS:
        original = ask_torch_npu(conf)
        allocator = make_allocator(conf)
        for workload, speed in measure(allocator.malloc, allocator.free, 0).items():
            ratio = speed / original[workload]
            print(f"{conf or 'default':<26}{workload:<34}{speed:>10,.0f}{original[workload]:>11,.0f}{ratio:>7.2f}")


if __name__ == "__main__":
    main()
