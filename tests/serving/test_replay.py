"""Steps that are repeated instead of executed give the same figures, to the byte and the nanosecond."""

from __future__ import annotations

from pathlib import Path

import pytest

from xlite_runner.bench.report import bench_to_document
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.scenario import load_scenario

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.sim_only("only a simulated device can repeat a step without executing it")


def figures(path, workload, *, replays):
    """Everything that a benchmark reports, and how many steps were repeated."""
    from xlite_runner.bench.simulation import serve

    scenario = load_scenario(path, {"workload": workload, "bench": {"save_detailed": True}})
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    served = serve(scenario, config, ProfilePolicy.SKIP, replays=replays)
    (document,) = bench_to_document([served.result], {}, detailed=True)["results"]
    num_replayed_steps = document["load"].pop("num_replayed_steps")
    document["memory over time"] = served.panel.memory
    document["load over time"] = served.panel.load
    return document, num_replayed_steps


WORKLOADS = {
    "greedy": {
        "num_prompts": 8,
        "random_input_len": 150,
        "random_output_len": 20,
        "random_range_ratio": 0.5,
        "request_rate": 300.0,
        "sampling": {"stop_token_ids": list(range(0, 1024, 32))},
    },
    "random": {
        "num_prompts": 6,
        "random_input_len": 40,
        "random_output_len": 12,
        "random_range_ratio": 0.5,
        "request_rate": 300.0,
        "sampling": {"temperature": 1.0, "top_p": 0.9},
    },
    "allowed tokens": {
        "num_prompts": 3,
        "random_input_len": 40,
        "random_output_len": 9,
        "request_rate": 300.0,
        "sampling": {"temperature": 1.0, "min_p": 0.1, "top_k": 5, "allowed_token_ids": [1, 2, 3]},
    },
    "greedy with filters": {
        "num_prompts": 4,
        "random_input_len": 200,
        "random_output_len": 9,
        "request_rate": 300.0,
        "sampling": {"top_p": 0.5},
    },
    "penalties": {
        "num_prompts": 2,
        "random_input_len": 40,
        "random_output_len": 3,
        "sampling": {"presence_penalty": 1.0},
    },
    "seeds": {
        "num_prompts": 2,
        "random_input_len": 300,
        "random_output_len": 3,
        "sampling": {"temperature": 1.0, "seed": 5},
    },
}


NEVER_REPEATED = ("penalties", "seeds")
RARE = ("greedy", "allowed tokens", "greedy with filters", *NEVER_REPEATED)


@pytest.mark.parametrize("case", ["random", *(pytest.param(name, marks=pytest.mark.slow) for name in RARE)])
def test_repeated_steps_change_no_figure(case):
    repeated, num_repeated = figures(EXAMPLES / "tiny.toml", WORKLOADS[case], replays=True)
    executed, _ = figures(EXAMPLES / "tiny.toml", WORKLOADS[case], replays=False)
    assert repeated["event_log_digest"] == executed["event_log_digest"]
    assert repeated == executed
    assert (num_repeated > 0) == (case not in NEVER_REPEATED)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "random"])
def test_repeated_steps_change_no_figure_of_two_ranks(sampling):
    lengths = {"random_input_len": 9000, "random_output_len": 40, "random_range_ratio": 0.3}
    workload = {"num_prompts": 8, "sampling": sampling, **lengths}
    path = EXAMPLES / "qwen3-30b-a3b-serving.toml"
    repeated, num_repeated = figures(path, workload, replays=True)
    executed, _ = figures(path, workload, replays=False)
    assert repeated == executed
    assert num_repeated > 30
