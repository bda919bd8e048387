"""Audits of small models, each run once however many tests look at it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from xlite_runner.audit.result import AuditResult
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.scenario import Scenario, load_scenario

EXAMPLES = Path(__file__).parents[2] / "examples"
SEED = EXAMPLES / "qwen3-30b-a3b-tp2-ep2.toml"

SMALL_MODEL = {
    "num_hidden_layers": 1,
    "num_experts": 8,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
}
SMALL_ENGINE = {
    "max_num_seqs": 16,
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.05,
    "environment": {"HCCL_BUFFSIZE": 8},
    "audit": {"sampling": []},
}


@pytest.fixture(scope="session")
def small_scenario(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Scenario]:
    """``small_scenario(**overrides)``: the published start-up (two dies, TP2 EP2, xlite full mode), made small.

    Tables of the overrides are merged with those of the small engine, except ``audit``.
    """
    path = tmp_path_factory.mktemp("models") / "small.json"
    published = json.loads((EXAMPLES / "models" / "Qwen3-30B-A3B.json").read_text())
    path.write_text(json.dumps(published | SMALL_MODEL))

    def load(**overrides: Any) -> Scenario:
        environment = SMALL_ENGINE["environment"] | overrides.pop("environment", {})
        return load_scenario(SEED, {"model": path, **SMALL_ENGINE, **overrides, "environment": environment})

    return load


@pytest.fixture(scope="session")
def audit_of(small_scenario: Callable[..., Scenario]) -> Callable[..., AuditResult]:
    """``audit_of(policy, **overrides)``: the audit of a small scenario."""
    from xlite_runner.simulation import audit

    results: dict[str, AuditResult] = {}

    def audit_once(policy: str, **overrides: Any) -> AuditResult:
        key = repr((policy, sorted(overrides.items())))
        if key not in results:
            scenario = small_scenario(**overrides)
            config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
            results[key] = audit(scenario, config, ProfilePolicy(policy))
        return results[key]

    return audit_once


@pytest.fixture
def start_engine(small_scenario: Callable[..., Scenario]) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """``start_engine(policy, **overrides)``: a world, active until the test ends, and an engine that started in it."""
    from torch.distributed import HashStore

    from npusim.told import ToldTokens
    from xlite_runner.simulation import build_world

    with ExitStack() as stack:

        def start(policy: str, **overrides: Any) -> tuple[Any, Any]:
            scenario = small_scenario(**overrides)
            config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
            told = ToldTokens(config.model.vocab_size, acceptance_rate=0.6)
            world = build_world(scenario, config, ProfilePolicy(policy), told_values=told)
            gc.freeze()
            stack.callback(gc.unfreeze)
            stack.enter_context(world)
            from xlite_runner.engine import EngineCore

            engine = EngineCore(config, ProfilePolicy(policy), world.run_ranks, HashStore())
            engine.start()
            return world, engine

        yield start
