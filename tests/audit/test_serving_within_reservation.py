"""Whatever requests come, serving stays within what policy ``audited`` reserved."""

from __future__ import annotations

import random
from typing import Any

import pytest

from xlite_runner.serving.core.request import Request
from xlite_runner.serving.sampling_params import SamplingParams

pytestmark = pytest.mark.sim_only("the ledger's peak of a particular card")

ALL = ("temperature", "top_p", "top_k", "min_p", "penalties", "logprobs", "seed", "allowed_token_ids")
DECODE_ONLY = {"xlite_graph_config": {"full_mode": False}}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "segments of fixed size": {"environment": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}},
    "decode-only": DECODE_ONLY,
    "drafts": {"num_speculative_tokens": 1},
    "replicas without XCCL": {
        "tensor_parallel_size": 1,
        "data_parallel_size": 2,
        "environment": {"XLITE_DISABLE_XCCL": 1},
    },
    "prompt log probabilities": {"audit": {"sampling": [*ALL, "prompt_logprobs"]}},
    "KV transfer": {"kv_transfer_config": {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}},
}


def random_params(chance: random.Random, *, prompt_logprobs: bool) -> SamplingParams:
    """Each feature of its own, with some probability."""
    settings: dict[str, Any] = {"temperature": chance.choice((0.0, 0.7, 1.0)), "max_tokens": chance.randint(1, 12)}
    features: dict[str, Any] = {
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logprobs": chance.randint(0, 20),
        "seed": chance.randint(0, 99),
        "allowed_token_ids": tuple(range(chance.randint(1, 50))),
    }
    if prompt_logprobs:
        features["prompt_logprobs"] = chance.randint(0, 20)
    settings |= {name: value for name, value in features.items() if chance.random() < 0.3}
    return SamplingParams(ignore_eos=True, **settings)


@pytest.mark.parametrize(
    ("setting", "seed", "num_requests"),
    [
        ("full", 0, 12),
        *(
            pytest.param(setting, seed, 40, marks=pytest.mark.slow, id=f"{setting}-{seed}")
            for setting in SETTINGS
            for seed in range(3)
        ),
    ],
)
def test_random_requests(start_engine, setting, seed, num_requests):
    overrides = {"audit": {"sampling": list(ALL)}, **SETTINGS[setting]}
    world, engine = start_engine("audited", **overrides)
    from xlite_runner.serving.engine_core import ServingEngine
    from xlite_runner.serving.executor import WorkerExecutor

    chance, config = random.Random(seed), engine.config
    for card in world.cards:
        card.ledger.reset_peak()
    executor = WorkerExecutor(engine.workers, config.parallel.num_replicas, world.run_ranks)
    serving = ServingEngine.from_config(config, engine.num_gpu_blocks, executor)
    waiting = [
        Request(
            f"r{number}",
            [chance.randrange(config.model.vocab_size) for _ in range(chance.choice((1, 60, 400, 1000)))],
            random_params(chance, prompt_logprobs="prompt_logprobs" in overrides["audit"]["sampling"]),
        )
        for number in range(num_requests)
    ]
    while waiting or serving.has_work:
        for _ in range(min(chance.randint(0, 6), len(waiting))):
            serving.add_request(waiting.pop())
        serving.step()
    for worker, card in zip(engine.workers, world.cards, strict=True):
        at_start = card.ledger.capacity_bytes - worker.memory.init_snapshot.free_memory
        assert card.ledger.peak_bytes - at_start <= worker.memory.requested
