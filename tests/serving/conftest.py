"""Engines that were started, for tests of their steps."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from npusim.told import ToldTokens
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.scenario import load_scenario

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def started_seed(tmp_path_factory):
    """The published model with 3 of its 48 layers on two simulated dies, started once, in a world that tells tokens.

    Step peaks above the idle level do not depend on the number of layers.
    """
    import json

    from xlite_runner import simulation

    model = tmp_path_factory.mktemp("models") / "short.json"
    published = json.loads((EXAMPLES / "models" / "Qwen3-30B-A3B.json").read_text())
    model.write_text(json.dumps(published | {"num_hidden_layers": 3}))
    scenario = load_scenario(EXAMPLES / "qwen3-30b-a3b-tp2-ep2.toml", {"model": model})
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    told = ToldTokens(config.model.vocab_size)
    world = simulation.build_world(scenario, config, ProfilePolicy.SKIP, told_values=told)
    gc.freeze()
    with world:
        from torch.distributed import HashStore

        from xlite_runner.engine import EngineCore

        engine = EngineCore(config, ProfilePolicy.SKIP, world.run_ranks, HashStore())
        engine.start()
        yield world, engine
    gc.unfreeze()
