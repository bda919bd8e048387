"""The published pair of start-ups under load: how many requests of the model's full length run at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.fake_worker import make_scheduler
from tests.serving.test_benchmark import Executor, StepClock
from xlite_runner.bench.benchmark import Benchmark
from xlite_runner.bench.workload import build_requests
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.scenario import load_scenario
from xlite_runner.serving.engine_core import ServingEngine

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3-30b-a3b-serving.toml"
EXPECTED = {ProfilePolicy.RUNNABLE: (4357, 13), ProfilePolicy.SKIP: (4892, 15)}


@pytest.mark.parametrize("policy", EXPECTED)
def test_blocks_decide_how_many_run_at_once(policy):
    num_blocks, max_running = EXPECTED[policy]
    scenario = load_scenario(EXAMPLE, {"workload": {"random_input_len": 40840, "random_output_len": 120}})
    clock = StepClock()
    engine = ServingEngine([make_scheduler(num_blocks, enable_prefix_caching=False)], Executor(clock))
    run = Benchmark(engine, clock, vocab_size=100, max_model_len=40960).run(build_requests(scenario.workload))
    assert run.load.max_num_running == max_running
    assert run.num_preemptions == 0
    assert [record.output_len for record in run.records] == [120] * 64


@pytest.mark.slow
@pytest.mark.sim_only("particular cards in virtual time")
def test_the_whole_scenario():
    from xlite_runner.bench.simulation import serve

    scenario = load_scenario(EXAMPLE)
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    throughput = {}
    for policy, (num_blocks, max_running) in EXPECTED.items():
        result = serve(scenario, config, policy).result
        assert (result.profile.num_gpu_blocks, result.run.load.max_num_running) == (num_blocks, max_running)
        assert (result.metrics.completed, result.run.num_preemptions) == (64, 0)
        assert result.metrics.total_output_tokens == 64 * 960
        throughput[policy] = result.metrics.output_throughput
    assert throughput[ProfilePolicy.SKIP] > throughput[ProfilePolicy.RUNNABLE]
