"""Sizes in MB of published models, built from their dimensions; the real libraries gave these numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npusim.xlite import (
    DeviceFacts,
    DType,
    Environment,
    ModelConfig,
    QuantKind,
    RankModel,
    ScoringFuncType,
    WeightFacts,
    tensor_pool_size,
)

VERSIONS = ("0.1.0rc11", "0.2.0rc0", "0.2.0rc4")

SERVING = {
    "max_batch_size": 64,
    "max_seq_len": 40960,
    "block_size": 128,
    "def_dp_size": 1,
    "moe_tp_size": 1,
    "max_m": 8192,
}
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "rope_head_dim": 128, "qk_norm": True}
QWEN3_30B = QWEN3 | {
    "hidden_size": 2048,
    "n_layers": 48,
    "n_heads": 32,
    "n_kv_heads": 4,
    "n_routed_experts": 128,
    "n_act_experts": 8,
    "moe_intermediate_size": 768,
}
QWEN3_235B = QWEN3_30B | {"hidden_size": 4096, "n_layers": 94, "n_heads": 64, "moe_intermediate_size": 1536}
QWEN3_32B = QWEN3 | {
    "hidden_size": 5120,
    "n_layers": 64,
    "n_dense_layers": 64,
    "n_heads": 64,
    "n_kv_heads": 8,
    "intermediate_size": 25600,
}
QWEN3_8B = QWEN3_32B | {
    "hidden_size": 4096,
    "n_layers": 36,
    "n_dense_layers": 36,
    "n_heads": 32,
    "intermediate_size": 12288,
}
QWEN3_0_6B = QWEN3_32B | {
    "hidden_size": 1024,
    "n_layers": 28,
    "n_dense_layers": 28,
    "n_heads": 16,
    "intermediate_size": 3072,
}
GLM_4_7 = {
    "vocab_size": 151552,
    "hidden_size": 5120,
    "n_layers": 92,
    "n_dense_layers": 3,
    "n_heads": 96,
    "n_kv_heads": 8,
    "head_dim": 128,
    "rope_head_dim": 64,
    "qkv_bias": True,
    "qk_norm": True,
    "intermediate_size": 12288,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "n_act_experts": 8,
    "moe_intermediate_size": 1536,
    "scoring_func": ScoringFuncType.ScoringFuncSigmoid,
}
MINIMAX_M2 = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "n_layers": 62,
    "n_heads": 48,
    "n_kv_heads": 8,
    "head_dim": 128,
    "rope_head_dim": 64,
    "qk_norm_full": True,
    "n_routed_experts": 256,
    "n_act_experts": 8,
    "moe_intermediate_size": 1536,
    "scoring_func": ScoringFuncType.ScoringFuncSigmoid,
}
W8A8 = WeightFacts(mha_qkv=QuantKind.DYNAMIC, attn_out=QuantKind.DYNAMIC, experts_quantised=True, gate_dtype=DType.BF16)

TABLE = [
    ("seed", QWEN3_30B, {"def_tp_size": 2, "moe_ep_size": 2}, 519, 519),
    ("short context", QWEN3_30B, {"def_tp_size": 2, "moe_ep_size": 2, "max_seq_len": 2048}, 519, 519),
    ("four ranks", QWEN3_30B, {"def_tp_size": 4, "moe_ep_size": 4}, 519, 519),
    ("2048 tokens", QWEN3_30B, {"def_tp_size": 2, "moe_ep_size": 2, "max_m": 2048}, 132, 130),
    ("4096 tokens", QWEN3_30B, {"def_tp_size": 2, "moe_ep_size": 2, "max_m": 4096}, 260, 260),
    ("16384 tokens", QWEN3_30B, {"def_tp_size": 2, "moe_ep_size": 2, "max_m": 16384}, 1037, 1037),
    ("32768 tokens", QWEN3_30B, {"def_tp_size": 2, "moe_ep_size": 2, "max_m": 32768}, 2073, 2073),
    ("decode only", QWEN3_30B, {"def_tp_size": 2, "moe_ep_size": 2, "max_m": 64}, 99, 83),
    ("no EP", QWEN3_30B, {"def_tp_size": 2, "moe_ep_size": 1, "moe_tp_size": 2}, 423, 423),
    ("DP2", QWEN3_30B, {"def_tp_size": 1, "def_dp_size": 2, "moe_ep_size": 2}, 1039, 1039),
    (
        "DP4",
        QWEN3_30B,
        {
            "def_tp_size": 2,
            "def_dp_size": 4,
            "moe_ep_size": 8,
            "max_m": 32768,
            "max_batch_size": 200,
            "max_seq_len": 6656,
        },
        8043,
        8043,
    ),
    ("235B TP8", QWEN3_235B, {"def_tp_size": 8, "moe_ep_size": 8}, 1031, 1031),
    (
        "235B TP16",
        QWEN3_235B,
        {"def_tp_size": 16, "moe_ep_size": 16, "max_m": 4096, "max_batch_size": 16},
        516,
        516,
    ),
    ("32B TP8", QWEN3_32B, {"def_tp_size": 8}, 400, 400),
    ("32B TP2", QWEN3_32B, {"def_tp_size": 2}, 880, 880),
    ("8B", QWEN3_8B, {"def_tp_size": 1, "max_batch_size": 256}, 704, 704),
    ("0.6B", QWEN3_0_6B, {"def_tp_size": 1, "max_batch_size": 256, "max_seq_len": 1024}, 224, 208),
    ("GLM-4.7", GLM_4_7, {"def_tp_size": 8, "moe_ep_size": 8}, 1192, 1192),
]


def model_of(dimensions, parallel, version, num_ai_cores=24, **facts):
    return RankModel(
        config=ModelConfig(**(dimensions | SERVING | parallel)),
        device=DeviceFacts(num_ai_cores=num_ai_cores, devices_per_node=16),
        version=version,
        **facts,
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("dimensions", "parallel", "on_24_cores", "on_20_cores"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_published_model(dimensions, parallel, on_24_cores, on_20_cores, version):
    sizes = [tensor_pool_size(model_of(dimensions, parallel, version, cores)).megabytes for cores in (24, 20)]
    assert sizes == [on_24_cores, on_20_cores]


@pytest.mark.parametrize("version", VERSIONS)
def test_quantised_models(version):
    qwen = model_of(QWEN3_30B, {"def_tp_size": 2, "moe_ep_size": 2}, version, weights=W8A8)
    assert tensor_pool_size(qwen).megabytes == 455
    fp32_gate = replace(W8A8, gate_dtype=DType.FP32)
    minimax = model_of(MINIMAX_M2, {"def_tp_size": 8, "moe_ep_size": 8}, version, weights=fp32_gate)
    assert tensor_pool_size(minimax).megabytes == 689


@pytest.mark.parametrize(("version", "megabytes"), [("0.1.0rc11", 519), ("0.2.0rc0", 295), ("0.2.0rc4", 295)])
def test_ratio_of_active_tokens(version, megabytes):
    halved = Environment(active_tokens_ratio=0.5)
    model = model_of(QWEN3_30B, {"def_tp_size": 2, "moe_ep_size": 2}, version, environment=halved)
    assert tensor_pool_size(model).megabytes == megabytes
