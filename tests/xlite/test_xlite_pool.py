from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npusim.errors import UnmodelledCallError
from npusim.xlite import AttnType, DeviceFacts, DType, Environment, ModelConfig, QuantKind, RankModel, tensor_pool_size
from npusim.xlite.arena import Arena, round_up
from npusim.xlite.forward import forward
from npusim.xlite.forward_pass import ForwardPass, Step
from npusim.xlite.pool import counting_pool, dummy_runs
from npusim.xlite.tensors import Tensor, TensorPool
from npusim.xlite.versions import VERSIONS

MIB = 1 << 20


def run_for_real(model, capacity_bytes, step=None):
    """One forward in a pool of the given size; returns the pool."""
    pool = TensorPool(Arena(capacity_bytes), bits_round_up=model.behaviour.bits_round_up)
    step = step or Step.of(model, [model.max_m], [0])
    output = Tensor((step.num_tokens, model.config.hidden_size), model.weights.dtype)
    forward(ForwardPass(model, pool, step), output)
    return pool


def test_seed_case_term_by_term(seed_model):
    size = tensor_pool_size(seed_model)
    assert (size.num_bytes, size.megabytes, size.overruns) == (543_295_488, 519, 0)
    assert [(tensor.taker, tensor.shape, tensor.block.num_bytes) for tensor in size.at_peak] == [
        ("ForwardEmbedAndLayers", (8192, 2048), 33_554_432),
        ("ForwardLayersCommOptimize", (8192, 2048), 33_554_432),
        ("ForwardMoEGate", (8192, 128), 2_097_152),
        ("ForwardMoEGate", (8192, 128), 131_072),
        ("ForwardMoEDispatch", (128, 8193), 4_194_816),
        ("ForwardMoEDispatch", (128,), 512),
        ("ForwardMoEDispatch", (65536, 2048), 268_435_456),
        ("ForwardMoE", (65536, 1536), 201_326_592),
    ]


@settings(derandomize=True, deadline=None)
@given(
    tokens=st.integers(2500, 40_000),
    hidden=st.integers(16, 64).map(lambda value: 128 * value),
    experts=st.integers(8, 256),
    chosen=st.integers(4, 8),
    width_share=st.integers(1, 16),
    version=st.sampled_from(sorted(VERSIONS)),
)
def test_closed_form_of_the_usual_moe_peak(tokens, hidden, experts, chosen, width_share, version):
    """The known closed form, where routed experts outweigh attention and are no wider than the hidden states."""
    width = hidden * width_share // 16
    config = ModelConfig(
        hidden_size=hidden,
        n_layers=1,
        n_heads=8,
        n_kv_heads=2,
        head_dim=64,
        n_routed_experts=experts,
        n_act_experts=chosen,
        moe_intermediate_size=width,
        def_tp_size=1,
        def_dp_size=1,
        moe_ep_size=1,
        moe_tp_size=1,
        max_m=tokens,
        max_batch_size=16,
        max_seq_len=8192,
        block_size=128,
    )
    model = RankModel(config=config, device=DeviceFacts(num_ai_cores=4, devices_per_node=8), version=version)
    bits = -(-tokens * experts // 8) if version.startswith("0.2") else tokens * experts // 8
    rows = tokens * chosen
    terms = [2 * tokens * hidden] * 2 + [2 * tokens * experts, bits, 4 * experts * (tokens + 1), 4 * experts]
    terms += [2 * rows * hidden, 4 * rows * width]
    assert tensor_pool_size(model).num_bytes == sum(round_up(term, 1024) for term in terms)


def test_further_layers_need_no_more(seed_model):
    deep = counting_pool(seed_model)
    dummy_runs(seed_model, deep)
    assert deep.arena.peak_bytes == tensor_pool_size(seed_model).num_bytes


@pytest.mark.parametrize("version", VERSIONS)
def test_real_forward_fits_into_its_pool(version, golden_rows, rank_model):
    rows = [row for row in golden_rows.values() if row["kind"] == "named" and not row["results"][version]["error"]]
    for row in rows:
        model = rank_model(row, version).shortened()
        capacity_bytes = row["results"][version]["mb"] * MIB
        assert run_for_real(model, capacity_bytes).arena.blocks == (), row["name"]


def test_real_forward_in_too_small_a_pool(seed_model):
    assert run_for_real(seed_model, 543_295_488).arena.peak_bytes == 543_295_488
    with pytest.raises(RuntimeError) as refusal:
        run_for_real(seed_model, 543_295_488 - 1024)
    assert str(refusal.value) == "no free tensor"


def test_real_forward_stages_only_what_lies_outside_its_pool(golden_rows, rank_model):
    functions = {}
    for version in ("0.1.0rc11", "0.2.0rc0"):
        model = rank_model(golden_rows[0], version).shortened()
        events = []
        pool = TensorPool(Arena(519 * MIB), bits_round_up=model.behaviour.bits_round_up, events=events)
        step = Step.of(model, [model.max_m], [0])
        forward(ForwardPass(model, pool, step), Tensor((step.num_tokens, 2048), model.weights.dtype))
        functions[version] = {event.tensor.taker for event in events if event.tensor.taker.startswith("XliteOp")}
    assert functions == {"0.1.0rc11": {"XliteOpAllGather", "XliteOpReduceScatter"}, "0.2.0rc0": set()}


def test_real_decode_over_dp_without_xccl_replays_graphs(golden_rows, rank_model):
    model = replace(rank_model(golden_rows[16], "0.2.0rc0"), environment=Environment(disable_xccl=True)).shortened()
    step = Step.of(model, [1] * 8, [100] * 8)
    graphs = run_for_real(model, 1039 * MIB, step)
    eager = run_for_real(
        replace(model, environment=Environment(disable_xccl=True, enable_graph_comm=False)), 1039 * MIB, step
    )
    assert graphs.arena.blocks == eager.arena.blocks == ()
    assert model.captures_dp_graphs


@pytest.mark.parametrize(("lens", "num_tokens"), [([], 0), ([0, 0], 0), ([8192, 1], 8193)])
def test_batch_that_does_not_fit(seed_model, lens, num_tokens):
    with pytest.raises(RuntimeError, match=rf"^runtime.cpp:389: invalid attnMeta batched tokens\({num_tokens}\) > "):
        Step.of(seed_model, lens, [0] * len(lens))


def test_step_spans_whole_blocks_of_the_longest_request(seed_model):
    step = Step.of(seed_model, [1, 3], [10, 126])
    assert (step.num_tokens, step.num_requests, step.context, step.padded_tokens) == (4, 2, 256, 4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"attn_type": AttnType.AttnHybrid}, "attention <AttnType.AttnHybrid: 3> is not modelled"),
        ({"attn_output_gate": True}, "attn_output_gate is not modelled"),
        ({"def_tp_size": 0}, "ModelConfig.def_tp_size is 0, but xlite divides by it"),
        ({"moe_ep_size": 0}, "ModelConfig.moe_ep_size is 0, but xlite divides by it"),
    ],
)
def test_refuses_what_is_not_modelled(seed_model, change, text):
    with pytest.raises(UnmodelledCallError, match=text):
        tensor_pool_size(replace(seed_model, config=replace(seed_model.config, **change)))


def test_refuses_an_unknown_version(seed_model):
    with pytest.raises(UnmodelledCallError, match=r"xlite '0\.3\.0' is not modelled; modelled are 0\.1\.0rc11, "):
        tensor_pool_size(replace(seed_model, version="0.3.0"))


def test_alltoall_is_sized_but_not_run(seed_model):
    model = replace(seed_model, environment=Environment(moe_alltoall=True))
    assert tensor_pool_size(model).megabytes == 519
    with pytest.raises(UnmodelledCallError, match="XLITE_MOE_ALLTOALL"):
        run_for_real(model, 519 * MIB)


def test_dense_model_may_leave_the_moe_sizes_unset():
    config = ModelConfig(n_layers=1, n_dense_layers=1, def_tp_size=1, def_dp_size=1, block_size=16, max_m=1)
    assert tensor_pool_size(RankModel(config=config, device=DeviceFacts(num_ai_cores=20, devices_per_node=1)))


@pytest.mark.parametrize(
    ("dtype", "present", "kind"),
    [
        (DType.BF16, (False, False, False), QuantKind.NONE),
        (DType.BF16, (True, True, True), QuantKind.NONE),
        (DType.INT8, (True, True, True), QuantKind.STATIC),
        (DType.INT8, (False, False, True), QuantKind.DYNAMIC),
    ],
)
def test_kind_of_quantisation(dtype, present, kind):
    names = ("has_input_scale", "has_input_offset", "has_deq_scale")
    assert QuantKind.of("mha_qkv[0]", dtype, **dict(zip(names, present, strict=True))) is kind


def test_kind_of_quantisation_that_is_none():
    with pytest.raises(ValueError, match=r"^GetQuantType: mha_qkv\[0\] gets invalid matmul weights$"):
        QuantKind.of("mha_qkv[0]", DType.INT8, has_input_scale=True, has_input_offset=False, has_deq_scale=True)


def test_configuration_from_any_object_with_the_names():
    vendor = SimpleNamespace(hidden_size=64, attn_type=AttnType.AttnMLA, mrope_section=[1, 2], unknown=object())
    assert ModelConfig.from_object(vendor) == ModelConfig(
        hidden_size=64, attn_type=AttnType.AttnMLA, mrope_section=(1, 2)
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Environment()),
        ({"XLITE_COMM_OPTIMIZE_LEN": "0"}, Environment(comm_optimize_len=0)),
        ({"XLITE_COMM_OPTIMIZE_LEN": " +7"}, Environment(comm_optimize_len=7)),
        ({"XLITE_COMM_OPTIMIZE_LEN": "-5"}, Environment()),
        ({"XLITE_COMM_OPTIMIZE_LEN": "7 "}, Environment()),
        ({"XLITE_COMM_OPTIMIZE_LEN": "many"}, Environment()),
        ({"XLITE_DISABLE_XCCL": "Yes"}, Environment(disable_xccl=True)),
        ({"XLITE_DISABLE_XCCL": "0"}, Environment()),
        ({"HCCL_DETERMINISTIC": "TRUE"}, Environment(disable_xccl=True)),
        ({"HCCL_DETERMINISTIC": "strict"}, Environment()),
        ({"XLITE_ACTIVE_TOKENS_RATIO_PER_EP": ".5e0"}, Environment(active_tokens_ratio=0.5)),
        ({"XLITE_ACTIVE_TOKENS_RATIO_PER_EP": "inf"}, Environment()),
        ({"XLITE_ACTIVE_TOKENS_RATIO_PER_EP": "1e999"}, Environment()),
        ({"XLITE_ACTIVE_TOKENS_RATIO_PER_EP": "half"}, Environment()),
        ({"XLITE_DEVS_PER_NODE": "4"}, Environment(devs_per_node=4)),
        ({"XLITE_ENABLE_GRAPH_COMM": "off"}, Environment(enable_graph_comm=False)),
        ({"XLITE_MOE_ALLTOALL": "on"}, Environment(moe_alltoall=True)),
    ],
)
def test_environment_as_the_library_reads_it(variables, expected):
    assert Environment.from_mapping(variables) == expected
