"""Speed of the allocator model: pairs of allocation and free per second of one core.

Run ``python benchmarks/allocator.py``; ``--quick`` leaves out the largest case.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from npusim.device.event_log import EventLog
from npusim.device.hbm import Hbm
from npusim.device.ledger import Ledger
from npusim.memory.caching_allocator import CachingAllocator
from npusim.memory.config import parse_allocator_config
from npusim.memory.driver import ManualStreamDriver

CONFIGURATIONS = ("", "expandable_segments:True")
FEW_SIZES = (300, 1000, 5000, 20_000, 60_000)
NUM_PAIRS = 20_000
NUM_ROUNDS = 5
TRACE_LENGTH = 100_000


def make_allocator(conf: str) -> CachingAllocator:
    return CachingAllocator(Hbm(Ledger(96 << 30), EventLog()), ManualStreamDriver(), parse_allocator_config(conf))


def pairs_per_second(conf: str, num_live: int, draw_size: Callable[[random.Random], int]) -> float:
    """The best of several rounds, each replacing random ones of ``num_live`` blocks."""
    choices = random.Random(num_live)
    allocator = make_allocator(conf)
    malloc, free = allocator.malloc, allocator.free
    live = [malloc(draw_size(choices), 0) for _ in range(num_live)]
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        indices = [choices.randrange(num_live) for _ in range(NUM_PAIRS)]
        sizes = [draw_size(choices) for _ in range(NUM_PAIRS)]
        start = time.process_time()
        for index, size in zip(indices, sizes, strict=True):
            free(live[index])
            live[index] = malloc(size, 0)
        best = min(best, time.process_time() - start)
    return NUM_PAIRS / best


def model_like_trace() -> list[tuple[int, int]]:
    """Allocations (key, bytes) and frees (key, 0) of many forward passes: weights stay, activations do not."""
    choices = random.Random(1)
    trace = [(key, choices.randrange(1 << 20, 64 << 20)) for key in range(300)]
    key, activations = len(trace), []
    while len(trace) < TRACE_LENGTH:
        if len(activations) < 12 and choices.random() < 0.55:
            size = choices.choice((4096, 100_000, 1 << 20, 8 << 20, 24 << 20)) + 512 * choices.randrange(8)
            trace.append((key, size))
            activations.append(key)
            key += 1
        elif activations:
            trace.append((activations.pop(choices.randrange(len(activations))), 0))
    return trace


def operations_per_second(conf: str, trace: list[tuple[int, int]]) -> float:
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        allocator = make_allocator(conf)
        addresses: dict[int, int] = {}
        start = time.process_time()
        for key, size in trace:
            if size:
                addresses[key] = allocator.malloc(size, 0)
            else:
                allocator.free(addresses.pop(key))
        best = min(best, time.process_time() - start)
    return len(trace) / best


def few_sizes(choices: random.Random) -> int:
    return choices.choice(FEW_SIZES)


def any_size(choices: random.Random) -> int:
    return choices.randrange(1, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out 10^6 live blocks")
    quick = parser.parse_args().quick
    trace = model_like_trace()
    print(f"{'configuration':<26}{'live blocks':>12}{'sizes':>8}{'pairs/s':>12}")
    for conf in CONFIGURATIONS:
        for exponent in range(3, 6 if quick else 7):
            for name, draw_size in (("five", few_sizes), ("any", any_size)):
                speed = pairs_per_second(conf, 10**exponent, draw_size)
                print(f"{conf or 'default':<26}{10**exponent:>12,}{name:>8}{speed:>12,.0f}", flush=True)
        speed = operations_per_second(conf, trace) / 2
        print(f"{conf or 'default':<26}{f'trace of {len(trace):,}':>20}{speed:>12,.0f}", flush=True)


if __name__ == "__main__":
    main()
