"""Mixture-of-experts communication: which way is chosen, and what it does to the tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from npusim.world import SimWorld
from xlite_runner.config import EngineArgs, ModelConfig, check_and_update_config
from xlite_runner.forward_context import (
    AscendDeviceType,
    BatchDescriptor,
    MoECommType,
    create_forward_context,
    mc2_tokens_capacity,
    select_moe_comm_method,
)
from xlite_runner.models.layers import BuildContext
from xlite_runner.moe.comm_method import make_moe_comm_methods
from xlite_runner.moe.fused_moe import FusedMoE
from xlite_runner.parallel_state import initialize_parallel_state

MODELS = Path(__file__).parents[2] / "examples" / "models"
MOE = ModelConfig.from_hf(json.loads((MODELS / "Qwen3-30B-A3B.json").read_text()))
DENSE = ModelConfig.from_hf(json.loads((MODELS / "Qwen3-32B.json").read_text()))
A2, A3, A5, P310 = AscendDeviceType.A2, AscendDeviceType.A3, AscendDeviceType.A5, AscendDeviceType._310P
ALLGATHER, ALLTOALL, MC2 = MoECommType.ALLGATHER, MoECommType.ALLTOALL, MoECommType.MC2


def config(model=MOE, **settings):
    defaults = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "enforce_eager": True}
    return check_and_update_config(EngineArgs.model_validate(defaults | settings), model)


EP2 = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
EP16 = {"tensor_parallel_size": 4, "data_parallel_size": 4, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("settings", "device", "num_tokens", "expected"),
    [
        ({"tensor_parallel_size": 2}, A3, 8192, ALLGATHER),  # experts not spread
        ({"enable_expert_parallel": True}, A3, 8192, ALLGATHER),  # over one rank
        (EP2, A2, 64, ALLGATHER),
        (EP2, A2, 8192, ALLGATHER),
        (EP16, A2, 64, MC2),  # 8 experts a device, 16 devices
        (EP16, A2, 65, ALLGATHER),
        (EP2, A3, 64, MC2),
        (EP2, A3, 65, ALLTOALL),
        (EP2, A3, 8192, ALLTOALL),
        (EP2, A5, 64, MC2),
        (EP2, A5, 65, ALLGATHER),  # 2 devices, 8 experts a token
        (EP16, A5, 65, ALLTOALL),
        (EP2, P310, 64, ALLGATHER),
    ],
)
def test_way_of_communication(settings, device, num_tokens, expected):
    assert select_moe_comm_method(num_tokens, config(**settings), device) is expected


def test_a_dense_model_has_no_way_of_communication():
    assert select_moe_comm_method(8192, config(DENSE), A3) is None


@pytest.mark.parametrize(
    ("settings", "capacity"),
    [
        ({"max_num_seqs": 64, **EP2}, 64),
        ({"max_num_seqs": 63, **EP2}, 64),  # whole tokens on each rank
        ({"max_num_seqs": 4096, **EP2}, 1024),  # at most 512 a rank
        ({"max_num_seqs": 64, "enforce_eager": False, **EP2}, 64),  # the largest captured step
    ],
)
def test_capacity_of_the_mc2_operators(settings, capacity):
    assert mc2_tokens_capacity(config(**settings)) == capacity


@pytest.mark.parametrize(("soc_version", "expected"), [(223, A2), (250, A3), (202, P310), (260, A5)])
def test_device_type(soc_version, expected):
    assert AscendDeviceType.of(soc_version) is expected


def test_unknown_device_type():
    with pytest.raises(RuntimeError, match=r"Can not support soc_version: 104\."):
        AscendDeviceType.of(104)


TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


def tiny_weights():
    generator = torch.Generator().manual_seed(1)
    w13 = torch.rand(8, 2 * 16, 32, generator=generator) - 0.5  # experts, gate and up, hidden: as in checkpoints
    w2 = torch.rand(8, 32, 16, generator=generator) - 0.5
    return w13.bfloat16(), w2.bfloat16()


def plain_experts(hidden_states, router_logits):
    """The same layer in a few lines of torch on the host, in float32."""
    w13, w2 = (weight.float() for weight in tiny_weights())
    hidden_states, router_logits = hidden_states.float(), router_logits.float()
    weights, ids = router_logits.softmax(-1).topk(3)
    weights = weights / weights.sum(-1, keepdim=True)
    output = torch.zeros_like(hidden_states)
    for token, (token_weights, token_ids) in enumerate(zip(weights, ids, strict=True)):
        for weight, expert in zip(token_weights, token_ids, strict=True):
            gate, up = (w13[expert] @ hidden_states[token]).chunk(2)
            output[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return output


@pytest.fixture
def run_layer():
    """``run_layer(settings, inputs of each rank, way)``: the layer's output on each rank, computed for real."""

    def run_layer(settings, inputs, way):
        engine_config = config(ModelConfig.from_hf(TINY), max_model_len=64, max_num_batched_tokens=64, **settings)
        store = dist.HashStore()

        def main(rank):
            device = torch.device("npu", rank)
            torch.npu.set_device(device)
            dist.init_process_group("hccl", store=store, rank=rank, world_size=len(inputs))
            groups = initialize_parallel_state(engine_config.parallel, rank, rank, is_moe=True)
            build = BuildContext(engine_config, groups, device, A3)
            moe = engine_config.model.moe
            layer = FusedMoE(build, moe, make_moe_comm_methods(build, moe))
            load_share(layer, groups)
            hidden_states, router_logits = (tensor.to(device) for tensor in inputs[rank])
            output = layer(hidden_states, router_logits, layer_context(inputs, rank, way, device, engine_config))
            return output.cpu()

        with SimWorld("a3-64g", num_devices=len(inputs), environment={}, values="real") as world:
            return world.run_ranks([lambda rank=rank: main(rank) for rank in range(len(inputs))])

    return run_layer


def load_share(layer, groups):
    """This rank's experts, or, if all ranks have all experts, its part of each."""
    w13, w2 = tiny_weights()
    if layer.expert_map is not None:
        first = groups.ep.rank_in_group * layer.local_num_experts
        w13, w2 = (w[first : first + layer.local_num_experts] for w in (w13, w2))
    else:
        parts, part = groups.ep.world_size, groups.ep.rank_in_group
        w13 = torch.cat([half.chunk(parts, 1)[part] for half in w13.chunk(2, 1)], 1)
        w2 = w2.chunk(parts, 2)[part]
    layer.w13_weight.data.copy_(w13)
    layer.w2_weight.data.copy_(w2)
    layer.process_weights_after_loading()


def layer_context(inputs, rank, way, device, engine_config):
    num_tokens = inputs[rank][0].size(0)
    most_tokens = max(hidden_states.size(0) for hidden_states, _ in inputs)
    created = create_forward_context(
        engine_config,
        A3,
        BatchDescriptor(num_tokens),
        max_tokens_across_dp=most_tokens,
        reserved_mc2_mask=torch.zeros(64, dtype=torch.bool, device=device),
    )
    return replace(created, moe_comm_type=way)


def random_inputs(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.rand(num_tokens, 32, generator=generator) - 0.5
    router_logits = torch.stack([torch.randperm(8, generator=generator) for _ in range(num_tokens)]) / 4  # no ties
    return hidden_states.bfloat16(), router_logits.bfloat16()


BF16 = {"atol": 1e-2, "rtol": 2e-2}
"""Each of five roundings to bfloat16 is off by at most 2**-9 of the value."""
SIM_ONLY = pytest.mark.sim_only("several ranks in one process are the simulation's")


@SIM_ONLY
@pytest.mark.parametrize("num_tokens", [6, 1])
@pytest.mark.parametrize(
    ("settings", "way"), [(EP2, ALLTOALL), (EP2, MC2), (EP2, ALLGATHER), ({"tensor_parallel_size": 2}, ALLGATHER)]
)
def test_every_way_computes_the_same(run_layer, settings, way, num_tokens):
    inputs = random_inputs(num_tokens)
    expected = plain_experts(*inputs)
    for output in run_layer(settings, [inputs, inputs], way):
        torch.testing.assert_close(output.float(), expected, **BF16)


@SIM_ONLY
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_all_gather_over_data_parallel_ranks_with_unequal_tokens(run_layer, expert_parallel):
    settings = {"data_parallel_size": 2, "enable_expert_parallel": expert_parallel}
    inputs = [random_inputs(5, seed=1), random_inputs(2, seed=2)]
    for output, own in zip(run_layer(settings, inputs, ALLGATHER), inputs, strict=True):
        torch.testing.assert_close(output.float(), plain_experts(*own), **BF16)


@SIM_ONLY
def test_all_to_all_over_data_parallel_ranks_with_unequal_tokens(run_layer):
    settings = {"data_parallel_size": 2, "enable_expert_parallel": True}
    inputs = [random_inputs(5, seed=1), random_inputs(2, seed=2)]
    for output, own in zip(run_layer(settings, inputs, ALLTOALL), inputs, strict=True):
        torch.testing.assert_close(output.float(), plain_experts(*own), **BF16)
