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


DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "eos_token_id": 7,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
FULL, DECODE_ONLY, OFF = {"enabled": True, "full_mode": True}, {"enabled": True}, {"enabled": False}


@pytest.fixture
def make_worker(npu_world):
    """``make_worker(model, xlite, rank, store, **settings)``: a worker with a KV cache, ready for steps.

    Its weights are larger than dummy weights are, so that tokens differ, and the same for all workers of a rank.
    """
    import torch
    import torch.distributed as dist

    from xlite_runner.config import EngineArgs
    from xlite_runner.kv_cache.planning import plan_kv_cache
    from xlite_runner.worker import NPUWorker, XliteWorker

    gc.freeze()
    num_made = []

    def make(model=DENSE, xlite=FULL, rank=0, store=None, *, num_blocks=12, **settings):
        if store is None and dist.is_initialized():
            dist.destroy_process_group()
        args = EngineArgs(
            **{"max_num_seqs": 8, "max_num_batched_tokens": 256, "block_size": 128, "enforce_eager": True}
            | {"xlite_graph_config": xlite}
            | settings
        )
        config = check_and_update_config(args, ModelConfig.from_hf(model))
        kind = (XliteWorker, ProfilePolicy.SKIP) if xlite["enabled"] else (NPUWorker,)
        worker = kind[0](config, rank, rank, store or dist.HashStore(), *kind[1:])
        worker.init_device()
        worker.load_model()
        generator = torch.Generator(device=worker.device).manual_seed(5)
        for parameter in worker.model_runner.get_model().parameters():
            if parameter.dim() > 1:
                with torch.inference_mode():
                    parameter.data.normal_(0, 0.15, generator=generator)
        worker.initialize_from_config(plan_kv_cache(worker.get_kv_cache_spec(), num_blocks))
        num_made.append(worker)
        return worker

    yield make
    gc.unfreeze()
    if dist.is_initialized():
        dist.destroy_process_group()
