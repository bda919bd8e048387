"""``xlite._C``: names, defaults and types of the native classes' attributes, as the published wheels have them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch


@pytest.fixture
def xlite(npu_world):
    return pytest.importorskip("xlite._C")


def refuses(text: str):
    return pytest.raises(
        TypeError, match=re.escape("(): incompatible function arguments.") + "(.|\n)*" + re.escape(text)
    )


INT_FIELDS = [
    "block_size",
    "deepstack_num_level",
    "def_dp_size",
    "def_tp_size",
    "head_dim",
    "hidden_size",
    "index_head_dim",
    "index_n_heads",
    "index_topk",
    "intermediate_size",
    "kv_lora_rank",
    "max_batch_size",
    "max_m",
    "max_num_batched_tokens",
    "max_seq_len",
    "moe_ep_size",
    "moe_intermediate_size",
    "moe_tp_size",
    "n_act_experts",
    "n_dense_layers",
    "n_heads",
    "n_layers",
    "n_routed_experts",
    "n_shared_experts",
    "nope_head_dim",
    "q_lora_rank",
    "rope_head_dim",
    "v_head_dim",
    "vocab_size",
]
BOOL_FIELDS = [
    "experts_weight_nz",
    "experts_weight_transpose",
    "index_rope_interleaved",
    "mrope_interleaved",
    "norm_topk_prob",
    "qk_norm",
    "qk_norm_full",
    "qkv_bias",
    "quant_attn_weight_nz",
    "quant_attn_weight_transpose",
    "weight_nz",
]
FLOAT_FIELDS = ["index_softmax_scale", "norm_eps", "rope_theta", "softmax_scale"]


def test_defaults_of_the_configuration(xlite):
    config = xlite.ModelConfig()
    assert {name: getattr(config, name) for name in INT_FIELDS} == dict.fromkeys(INT_FIELDS, 0)
    assert {name: getattr(config, name) for name in BOOL_FIELDS} == dict.fromkeys(BOOL_FIELDS, False)
    assert {name: getattr(config, name) for name in FLOAT_FIELDS} == dict.fromkeys(FLOAT_FIELDS, 0.0)
    for name in ("n_kv_heads", "n_expert_groups", "n_limited_groups"):
        assert getattr(config, name) == 1
    assert config.route_scale == 1.0
    assert config.gate_captured is True
    assert config.mrope_section == []
    assert config.attn_type == xlite.AttnMHA
    assert config.scoring_func == xlite.ScoringFuncSoftmax


def test_enumerations(xlite):
    assert [int(member) for member in (xlite.AttnMHA, xlite.AttnMLA, xlite.AttnDSA)] == [0, 1, 2]
    assert [int(member) for member in (xlite.ScoringFuncSoftmax, xlite.ScoringFuncSigmoid)] == [0, 1]
    assert xlite.AttnType.AttnMLA is xlite.AttnMLA
    assert xlite.AttnType(2) == xlite.AttnDSA
    assert repr(xlite.AttnMHA) == "<AttnType.AttnMHA: 0>"
    config = xlite.ModelConfig()
    config.attn_type = xlite.AttnDSA
    assert config.attn_type == xlite.AttnDSA
    with refuses("(self: xlite._C.ModelConfig, arg0: XModelAttnType) -> None"):
        config.attn_type = 0


@pytest.mark.parametrize("value", [0, 5, True, 2**32 - 1, np.int64(5)])
def test_unsigned_numbers(xlite, value):
    config = xlite.ModelConfig()
    config.vocab_size = value
    assert config.vocab_size == value
    assert type(config.vocab_size) is int


@pytest.mark.parametrize("value", [-1, 1.5, "a", None, 2**32, [1]])
def test_no_unsigned_numbers(xlite, value):
    config = xlite.ModelConfig()
    with refuses(
        "1. (self: xlite._C.ModelConfig, arg0: typing.SupportsInt) -> None\n\nInvoked with: <xlite._C.ModelConfig"
    ):
        config.vocab_size = value
    assert config.vocab_size == 0


@pytest.mark.parametrize("value", [1, 2.5, np.float32(2.5)])
def test_floats(xlite, value):
    config = xlite.ModelConfig()
    config.norm_eps = value
    assert config.norm_eps == value
    assert type(config.norm_eps) is float


@pytest.mark.parametrize("value", ["x", None, [1.0]])
def test_no_floats(xlite, value):
    with refuses("arg0: typing.SupportsFloat"):
        xlite.ModelConfig().norm_eps = value


@pytest.mark.parametrize(("value", "kept"), [(1, True), (0, False), (True, True), (None, False)])
def test_booleans(xlite, value, kept):
    config = xlite.ModelConfig()
    config.qkv_bias = value
    assert config.qkv_bias is kept


def test_no_booleans(xlite):
    with refuses("arg0: bool"):
        xlite.ModelConfig().qkv_bias = "a"


def test_lists_are_copied_in_and_out(xlite):
    config = xlite.ModelConfig()
    given = [1, 2]
    config.mrope_section = given
    given.append(3)
    config.mrope_section.append(4)
    assert config.mrope_section == [1, 2]
    config.mrope_section = (5, 6)
    assert config.mrope_section == [5, 6]
    for wrong in (["a"], 3, None, [-1], "12"):
        with refuses("arg0: collections.abc.Sequence[typing.SupportsInt]"):
            config.mrope_section = wrong


def test_two_names_for_one_field(xlite):
    config = xlite.ModelConfig()
    config.max_m = 5
    assert config.max_num_batched_tokens == 5
    config.max_num_batched_tokens = 7
    assert config.max_m == 7
    model = xlite.Model()
    model.re_up_gate_scale = [torch.ones(1)]
    assert len(model.re_up_gate_deq_scale) == 1
    model.re_down_deq_scale = [torch.ones(1)]
    assert len(model.re_down_scale) == 1


@pytest.mark.parametrize("name", ["ModelConfig", "Model", "AttnMeta"])
def test_unknown_attributes(xlite, name):
    kind = getattr(xlite, name)
    with pytest.raises(AttributeError, match=f"^'xlite._C.{name}' object has no attribute 'foo'$"):
        kind().foo = 3
    assert not hasattr(kind(), "foo")
    derived = type("Derived", (kind,), {})()
    derived.foo = 3
    assert derived.foo == 3


def test_fields_are_seen_on_the_class(xlite):
    for kind, name in ((xlite.ModelConfig, "max_m"), (xlite.Model, "attn_norm"), (xlite.AttnMeta, "lens")):
        assert hasattr(kind, name)
        assert not hasattr(kind, "foo")


@pytest.mark.sim_only("releases are a setting of the world")
@pytest.mark.parametrize("version", ["0.1.0rc11", "0.2.0rc0"])
def test_fields_come_and_go_with_releases(version):
    from npusim import SimWorld

    with SimWorld(environment={}, xlite_version=version):
        from xlite._C import AttnMeta, Model, ModelConfig

        is_new = version.startswith("0.2")
        assert hasattr(ModelConfig, "full_attention_interval") == is_new
        assert hasattr(Model, "mla_wuv") == is_new
        assert hasattr(Model, "mla_kv_b") == hasattr(AttnMeta, "is_prefills") == (not is_new)
        assert ("full_attention_interval" in dir(ModelConfig())) == is_new
        assert "max_m" in dir(ModelConfig())
        if is_new:
            assert ModelConfig().full_attention_interval == 4
        else:
            with pytest.raises(AttributeError, match="full_attention_interval"):
                ModelConfig().full_attention_interval = 4


def test_weights(xlite):
    model = xlite.Model()
    assert [getattr(model, name) for name in ("embed", "norm", "norm_bias", "head")] == [None] * 4
    weight = torch.ones(2)
    model.embed = weight
    assert torch.equal(model.embed, weight)
    for wrong in (None, 3, [weight]):
        with refuses("(self: xlite._C.Model, arg0: torch.Tensor) -> None"):
            model.embed = wrong


@pytest.mark.parametrize("give", [list, tuple, iter, lambda tensors: (tensor for tensor in tensors)])
def test_lists_of_weights(xlite, give):
    model = xlite.Model()
    assert model.mha_qkv == []
    if give is iter:
        with refuses("arg0: collections.abc.Sequence[torch.Tensor]"):
            model.mha_qkv = give([torch.ones(1)])
        return
    model.mha_qkv = give([torch.ones(1), torch.ones(2)])
    assert [tensor.numel() for tensor in model.mha_qkv] == [1, 2]
    assert isinstance(model.mha_qkv, list)


@pytest.mark.parametrize("value", [None, [None], [3], 3, torch.ones(2, 2), {1: 2}])
def test_no_lists_of_weights(xlite, value):
    with refuses("(self: xlite._C.Model, arg0: collections.abc.Sequence[torch.Tensor]) -> None"):
        xlite.Model().mha_qkv = value


def test_names_of_weights(xlite):
    linear = ("attn_out", "mha_qkv", "mla_qkv_a", "mla_q_b", "index_q_b", "mlp_up_gate", "mlp_down")
    names = [
        f"{name}{suffix}"
        for name in linear
        for suffix in ("", "_input_scale", "_input_offset", "_quant_bias", "_deq_scale")
    ]
    norms = ("attn_norm", "mlp_norm", "mha_q_norm", "mha_k_norm", "mla_q_norm", "mla_kv_norm", "index_k_norm")
    names += [f"{name}{suffix}" for name in norms for suffix in ("", "_bias")]
    names += ["mha_qkv_bias", "mla_kv_b", "index_k_weights_proj", "gate", "gate_bias"]
    names += [f"se_{name}{suffix}" for name in ("up_gate", "down") for suffix in ("", "_deq_scale")]
    names += [f"re_{name}{suffix}" for name in ("up_gate", "down") for suffix in ("", "_scale", "_deq_scale")]
    model = xlite.Model()
    assert {name: getattr(model, name) for name in names} == {name: [] for name in names}


def test_attention_metadata(xlite):
    meta = xlite.AttnMeta()
    assert (meta.lens, meta.cached_lens, meta.block_tables_cpu, meta.positions) == ([], [], [], None)
    meta.lens = np.array([1, 2])
    meta.block_tables_cpu = [[1], (2, 3)]
    assert meta.lens == [1, 2]
    assert meta.block_tables_cpu == [[1], [2, 3]]
    meta.positions = torch.arange(2)
    for name, wrong in (
        ("lens", [-1]),
        ("lens", 3),
        ("lens", torch.tensor([1])),
        ("block_tables_cpu", [1]),
        ("block_tables_cpu", [[-1]]),
        ("positions", None),
        ("positions", 3),
    ):
        with refuses("(self: xlite._C.AttnMeta, arg0: "):
            setattr(meta, name, wrong)


@pytest.mark.parametrize("arguments", [("a",), (-1,), (0.5,), (0, -1)])
def test_runtime_takes_unsigned_numbers(xlite, arguments):
    text = (
        "__init__(): incompatible constructor arguments. The following argument types are supported:\n    1. xlite._C"
    )
    with pytest.raises(TypeError, match=re.escape(text)):
        xlite.Runtime(*arguments)


def test_runtime_without_a_pool_touches_no_device(xlite):
    free = torch.npu.mem_get_info()[0]
    runtime = xlite.Runtime(0)
    assert runtime.init_tensor_pool(0) == 0
    xlite.Runtime(devid=0, size=0, rank=1, tp_size=2, dp_size=1, moe_tp_size=1, moe_ep_size=2)
    with pytest.raises(TypeError, match=re.escape("init_tensor_pool(): incompatible function arguments.")):
        runtime.init_tensor_pool(-1)
    assert torch.npu.mem_get_info()[0] == free


def test_init_takes_xlites_configuration_only(xlite):
    with pytest.raises(TypeError, match=re.escape("init(): incompatible function arguments.")):
        xlite.Model().init({})
