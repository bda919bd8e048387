"""What xlite gets of a model: configuration and weights, by reference."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("xlite._C")

from xlite_runner.adapters import ADAPTERS, LlamaXliteModel, QwenMoeXliteModel, get_adapter
from xlite_runner.adapters.base import set_known_attributes
from xlite_runner.config import EngineArgs, ModelConfig, check_and_update_config
from xlite_runner.config.model_config import SUPPORTED_ARCHITECTURES
from xlite_runner.models.loader import build_model
from xlite_runner.parallel_state import initialize_parallel_state

DENSE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
}
MOE = {**DENSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


@pytest.fixture
def adapt(npu_device):
    """``adapt(architecture, ...)``: a tiny model on the device, and the adapter's view of it."""

    def adapt(architecture, *, full_mode=True, environment=None, **changes):
        fields = MOE if "Moe" in architecture else DENSE
        model_config = ModelConfig.from_hf({"architectures": [architecture], **fields, **changes})
        args = {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "max_model_len": 512,
            "xlite_graph_config": {"enabled": True, "full_mode": full_mode},
            "environment": environment or {},
        }
        config = check_and_update_config(EngineArgs.model_validate(args), model_config)
        dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            groups = initialize_parallel_state(config.parallel, 0, 0, is_moe=model_config.moe is not None)
            model = build_model(config, groups, npu_device)
        finally:
            dist.destroy_process_group()
        return model, get_adapter(architecture)(model, config, rank=0)

    return adapt


def same(tensors, others):
    return [t.data_ptr() for t in tensors] == [o.data_ptr() for o in others]


def test_every_supported_architecture_has_an_adapter():
    assert set(ADAPTERS) == set(SUPPORTED_ARCHITECTURES)
    assert get_adapter("Qwen3MoeForCausalLM") is QwenMoeXliteModel
    assert get_adapter("Qwen3ForCausalLM") is LlamaXliteModel


def test_unsupported_architecture():
    with pytest.raises(ValueError, match=r"^MambaForCausalLM not supported!$"):
        get_adapter("MambaForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "qk_norm", "qkv_bias"),
    [("LlamaForCausalLM", False, False), ("Qwen2ForCausalLM", False, True), ("Qwen3ForCausalLM", True, False)],
)
def test_dense_model(adapt, architecture, qk_norm, qkv_bias):
    model, adapter = adapt(architecture)
    native, layers = adapter.native, model.model.layers
    assert same(
        [native.embed, native.norm, native.head],
        [model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight],
    )
    assert same(native.mha_qkv, [layer.self_attn.qkv_proj.weight for layer in layers])
    assert same(native.attn_out, [layer.self_attn.o_proj.weight for layer in layers])
    assert same(native.mlp_up_gate, [layer.mlp.gate_up_proj.weight for layer in layers])
    assert same(native.mlp_down, [layer.mlp.down_proj.weight for layer in layers])
    assert same(native.attn_norm, [layer.input_layernorm.weight for layer in layers])
    assert same(native.mlp_norm, [layer.post_attention_layernorm.weight for layer in layers])
    assert (len(native.mha_q_norm), len(native.mha_k_norm)) == ((2, 2) if qk_norm else (0, 0))
    assert len(native.mha_qkv_bias) == (2 if qkv_bias else 0)
    values = adapter.config_values
    assert (values["qk_norm"], values["qkv_bias"]) == (qk_norm, qkv_bias)
    assert (values["n_layers"], values["n_dense_layers"], values["moe_ep_size"], values["moe_tp_size"]) == (2, 2, 1, 1)


def test_tied_embeddings(adapt):
    model, adapter = adapt("Qwen3ForCausalLM", tie_word_embeddings=True)
    assert model.lm_head is model.model.embed_tokens
    assert same([adapter.native.head], [adapter.native.embed])


def test_mixture_of_experts(adapt):
    model, adapter = adapt("Qwen3MoeForCausalLM")
    native, experts = adapter.native, [layer.mlp.experts for layer in model.model.layers]
    assert (len(native.re_up_gate), len(native.re_down), len(native.gate)) == (16, 16, 2)
    assert same(native.re_up_gate[8:], experts[1].w13_weight)
    assert [tuple(t.shape) for t in (native.re_up_gate[0], native.re_down[0])] == [(256, 256), (128, 256)]
    assert not native.mlp_up_gate
    values = adapter.config_values
    assert (values["n_dense_layers"], values["n_routed_experts"], values["n_act_experts"]) == (0, 8, 2)
    assert (values["moe_intermediate_size"], values["norm_topk_prob"]) == (128, True)
    assert not values["experts_weight_nz"]


@pytest.mark.parametrize(("full_mode", "max_m"), [(True, 256), (False, 16)])
def test_the_largest_step_depends_on_the_mode(adapt, full_mode, max_m):
    _, adapter = adapt("Qwen3ForCausalLM", full_mode=full_mode)
    assert (adapter.config_values["max_m"], adapter.config_values["max_batch_size"]) == (max_m, 16)


def test_rotary_table(adapt):
    _, adapter = adapt("Qwen3ForCausalLM")
    table = adapter.freqs_cis
    assert (tuple(table.shape), table.dtype) == ((512, 64), torch.bfloat16)
    exponents = torch.arange(0, 64, 2, dtype=torch.float64) / 64
    angles = torch.outer(torch.arange(512, dtype=torch.float64), 10000.0**-exponents)
    expected = torch.cat((angles.cos(), angles.sin()), dim=1)
    torch.testing.assert_close(table.cpu().double(), expected, atol=1 / 256 + 1e-3, rtol=0)


class OldRelease:
    """A native object that lacks a field."""

    known = 0


def test_fields_that_a_release_lacks_are_left_out_and_named_once(caplog):
    with caplog.at_level(logging.WARNING, logger="xlite_runner.adapters.base"):
        target = OldRelease()
        set_known_attributes(target, {"known": 1, "new": 2}, warn=True)
        set_known_attributes(OldRelease(), {"new": 2}, warn=False)  # ranks other than 0
    assert vars(target) == {"known": 1}
    assert caplog.messages == ["OldRelease has no attribute new. Your `xlite` version might be incompatible."]
