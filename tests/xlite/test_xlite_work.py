"""How long a forward of xlite takes: by hand for a small model, and what it grows with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npusim.device.cost import CostModel, Product, Unit, Work
from npusim.device.profile import load_profile
from npusim.xlite import DeviceFacts, ModelConfig, QuantKind, RankModel, WeightFacts
from npusim.xlite.config import AttnType
from npusim.xlite.work import ForwardTime, Lengths

COSTS = CostModel(load_profile("a2-64g"))
DENSE = ModelConfig(
    hidden_size=64,
    n_layers=2,
    n_dense_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    def_tp_size=1,
    def_dp_size=1,
    moe_ep_size=1,
    moe_tp_size=1,
    max_m=8192,
    block_size=128,
)
MIXTURE = replace(
    DENSE, n_dense_layers=0, n_routed_experts=64, n_act_experts=4, moe_intermediate_size=512, hidden_size=1024
)
LATENT = replace(
    DENSE,
    attn_type=AttnType.AttnMLA,
    n_heads=16,
    q_lora_rank=96,
    kv_lora_rank=128,
    rope_head_dim=16,
    nope_head_dim=32,
    v_head_dim=32,
)


def rank_model(config: ModelConfig, **changes) -> RankModel:
    return RankModel(config=config, device=DeviceFacts(num_ai_cores=20, devices_per_node=8), **changes)


def takes_ns(config: ModelConfig, lens, cached_lens, **changes) -> int:
    return ForwardTime(rank_model(config, **changes), COSTS)(Lengths(lens, cached_lens))


def test_a_dense_model_by_hand():
    n, keys, pairs = 3, 3 + 40, 2 * 3 // 2 + 1 + 2 * 10 + 30
    vector, linear = (
        COSTS.vector_ns,
        lambda inner, columns: COSTS.kernel_ns(
            Work(Unit.MATMUL, 2 * (inner * columns + n * (inner + columns)), (Product(n, inner, columns),))
        ),
    )
    attention = Work(Unit.ATTENTION, 2 * 16 * (2 * n * 4 + 2 * keys * 2), attention_flops=4 * pairs * 4 * 16)
    layer = (
        2 * vector(4 * n * 64 * 2)
        + linear(64, 8 * 16)
        + vector(2 * n * 8 * 16 * 2)
        + COSTS.kernel_ns(attention)
        + linear(64, 64)
        + linear(64, 2 * 96)
        + vector(3 * n * 96 * 2)
        + linear(96, 64)
    )
    assert takes_ns(DENSE, [2, 1], [10, 30]) == vector(2 * n * 64 * 2) + 2 * layer


@pytest.mark.parametrize("config", [DENSE, MIXTURE, LATENT], ids=["dense", "mixture", "latent"])
def test_it_grows_with_layers_tokens_and_context(config):
    one = takes_ns(config, [1], [1000])
    assert takes_ns(replace(config, n_layers=4, n_dense_layers=2 * config.n_dense_layers), [1], [1000]) > 1.9 * one
    assert takes_ns(config, [4000], [0]) > takes_ns(config, [400], [0]) > one
    assert takes_ns(config, [1] * 64, [100000] * 64) > takes_ns(config, [1] * 64, [1000] * 64)


def test_tensor_parallel_ranks_share_the_work_and_add_collectives():
    wide = replace(DENSE, hidden_size=8192, n_heads=64, head_dim=128, n_kv_heads=8, intermediate_size=32768)
    alone, shared = (takes_ns(replace(wide, def_tp_size=tp), [1], [0]) for tp in (1, 8))
    latencies = (2 * 2 + 1) * COSTS.collective_ns("all_reduce", 8192 * 2, 8)
    assert alone / 8 < shared - latencies < alone / 4


def test_few_tokens_read_few_experts():
    one, many = (takes_ns(MIXTURE, [1] * n, [0] * n) for n in (1, 64))
    every_expert_ns = 2 * COSTS.memory_ns(Work(Unit.MATMUL, 64 * 3 * 1024 * 512 * 2))
    assert many > every_expert_ns * 0.9
    assert one < many - every_expert_ns * 0.8


def test_weights_of_8_bits_are_read_in_half_the_time():
    wide = replace(DENSE, hidden_size=8192, n_heads=64, head_dim=128, n_kv_heads=8, intermediate_size=32768)
    kinds = dict.fromkeys(("mha_qkv", "attn_out", "mlp_up_gate", "mlp_down"), QuantKind.DYNAMIC)
    plain, quantised = takes_ns(wide, [1], [0]), takes_ns(wide, [1], [0], weights=WeightFacts(**kinds))
    assert 0.5 < quantised / plain < 0.55


def test_chosen_keys_bound_sparse_attention():
    sparse = replace(LATENT, attn_type=AttnType.AttnDSA, index_n_heads=4, index_head_dim=16, index_topk=64)
    growth = [
        takes_ns(config, [1] * 64, [60000] * 64) - takes_ns(config, [1] * 64, [6000] * 64)
        for config in (LATENT, sparse)
    ]
    assert 0 < growth[1] < growth[0] / 3
