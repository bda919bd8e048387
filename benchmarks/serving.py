"""How much faster than its own virtual time the published pair is served, and where the time goes.

python benchmarks/serving.py [--profile] [--all-steps]
python benchmarks/serving.py --many-requests   # CPU time per step, as more and more requests have ended
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="print where the time of serving goes")
    parser.add_argument("--all-steps", action="store_true", help="execute every step of eight shorter requests")
    parser.add_argument("--many-requests", action="store_true", help="CPU time per step of 3,000 small requests")
    options = parser.parse_args()
    if options.many_requests:
        serve_many_requests()
        return

    from xlite_runner.bench import simulation
    from xlite_runner.bench.benchmark import Benchmark
    from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
    from xlite_runner.scenario import load_scenario

    few = {"num_prompts": 8, "random_input_len": 20000, "random_output_len": 60}
    path = ROOT / "examples" / "qwen3-30b-a3b-serving.toml"
    scenario = load_scenario(path, {"workload": few} if options.all_steps else {})
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    profile = cProfile.Profile()
    seconds = [0.0]
    run = Benchmark.run

    def measured(self: Benchmark, requests: Any) -> Any:
        begin = time.process_time()
        result = profile.runcall(run, self, requests) if options.profile else run(self, requests)
        seconds[0] = time.process_time() - begin
        return result

    Benchmark.run = measured  # type: ignore[method-assign]
    begin = time.process_time()
    result = simulation.serve(scenario, config, ProfilePolicy.SKIP, replays=not options.all_steps).result
    total = time.process_time() - begin
    load, virtual = result.run.load, result.metrics.duration
    print(f"virtual time          {virtual:9.1f} s")
    print(f"CPU time of serving   {seconds[0]:9.2f} s  {virtual / seconds[0]:6.0f} times faster")
    print(f"with the start-up     {total:9.2f} s  {virtual / total:6.0f} times faster")
    print(f"steps                 {load.num_steps:9d}    {load.num_steps / seconds[0]:6.0f} per second of CPU time")
    print(f"of them executed      {load.num_steps - result.num_replayed_steps:9d}")
    print(f"tokens scheduled      {load.num_scheduled_tokens:9d}")
    print(f"host memory, peak     {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:9.0f} MiB")
    if options.profile:
        pstats.Stats(profile).sort_stats("cumtime").print_stats(40)


def serve_many_requests() -> None:
    """Print the CPU time of a step for each tenth of the requests; the median, since few steps are executed."""
    from xlite_runner.bench import simulation
    from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
    from xlite_runner.scenario import load_scenario

    workload = {"num_prompts": 3000, "random_input_len": 100, "random_output_len": 8, "max_concurrency": 8}
    scenario = load_scenario(ROOT / "examples" / "tiny.toml", {"workload": workload})
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    steps: list[list[float]] = [[] for _ in range(10)]
    last = time.process_time()

    def measure(num_ended: int, num_requests: int) -> None:
        nonlocal last
        now = time.process_time()
        steps[min(10 * num_ended // num_requests, 9)].append(now - last)
        last = now

    simulation.serve(scenario, config, ProfilePolicy.SKIP, on_requests=measure)
    for tenth, seconds in enumerate(steps):
        microseconds = 1e6 * statistics.median(seconds)
        print(f"{300 * tenth:5d} requests ended: {microseconds:6.0f} us per step, {len(seconds)} steps")


if __name__ == "__main__":
    main()
