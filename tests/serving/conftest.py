"""Engines that were started, for tests of their steps."""

from __future__ import annotations

import gc
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from npusim.told import ToldTokens
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.scenario import load_scenario

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass
class Started:
    """An engine on simulated devices, and what rank 0 had allocated when it had started."""

    world: Any
    engine: Any
    allocated_bytes: int

    def execute(self, step):
        """Execute a step on all ranks; rank 0's output, its peak above what was allocated, and what is more after."""
        import torch

        def execute(worker):
            before = torch.npu.memory_allocated(worker.device)
            torch.npu.reset_peak_memory_stats(worker.device)
            output = worker.execute_model(step)
            peak = torch.npu.max_memory_allocated(worker.device) - before
            return output, peak, torch.npu.memory_allocated(worker.device) - before

        results = self.world.run_ranks([lambda worker=worker: execute(worker) for worker in self.engine.workers])
        assert len({repr(output) for output, _, _ in results}) == 1, "tensor-parallel ranks sample the same tokens"
        return results[0]


@contextmanager
def started(folder, **overrides):
    """The published model with 3 of its 48 layers on two simulated dies, in a world that tells tokens.

    Step peaks above the idle level do not depend on the number of layers.
    """
    from xlite_runner import simulation

    model = folder / "short.json"
    published = json.loads((EXAMPLES / "models" / "Qwen3-30B-A3B.json").read_text())
    model.write_text(json.dumps(published | {"num_hidden_layers": 3}))
    scenario = load_scenario(EXAMPLES / "qwen3-30b-a3b-tp2-ep2.toml", {"model": model, **overrides})
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    told = ToldTokens(config.model.vocab_size)
    world = simulation.build_world(scenario, config, ProfilePolicy.SKIP, told_values=told)
    gc.freeze()
    with world:
        import torch
        from torch.distributed import HashStore

        from xlite_runner.engine import EngineCore

        engine = EngineCore(config, ProfilePolicy.SKIP, world.run_ranks, HashStore())
        engine.start()
        yield Started(world, engine, torch.npu.memory_allocated(0))
    gc.unfreeze()


@pytest.fixture(scope="module")
def started_seed(tmp_path_factory):
    """The published configuration, started once."""
    with started(tmp_path_factory.mktemp("models")) as made:
        yield made


@pytest.fixture(scope="module")
def started_with_drafter(tmp_path_factory):
    """The same with one draft token."""
    with started(tmp_path_factory.mktemp("models"), num_speculative_tokens=1) as made:
        yield made


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
