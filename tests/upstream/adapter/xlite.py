"""vllm-ascend's xlite package: dispatch, profile run, pool, KV caches, and the adapter of the started architecture."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from xlite_runner.simulation import ledgers

ROWS = 4


def layers(upstream):
    return upstream.worker.model_runner.get_model().model.layers


def release_has_the_fix(upstream):
    return not upstream.result.release.startswith("0.22.")


# Dispatch


class Path:
    """Stands for one way through the model, and remembers whether it was taken."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments, **options):
        self.calls.append(arguments)
        return "runnable"

    forward = __call__


@pytest.fixture
def paths(wrapper, monkeypatch):
    """Stand-ins of the runnable and of xlite's model."""
    runnable, native = Path(), Path()
    monkeypatch.setattr(wrapper, "runnable", runnable)
    monkeypatch.setattr(wrapper, "xlite_model", native)
    return SimpleNamespace(runnable=runnable, native=native)


def metadata(state):
    from vllm_ascend.attention.attention_v1 import AscendMetadata

    return AscendMetadata(
        attn_state=state,
        num_actual_tokens=ROWS,
        query_start_loc=torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32),
        actual_seq_lengths_q=[1, 2, 3, 4],
        seq_lens=torch.tensor([5, 6, 7, 8], dtype=torch.int32),
        seq_lens_cpu=torch.tensor([5, 6, 7, 8], dtype=torch.int32),
        seq_lens_list=[5, 6, 7, 8],
        block_tables=torch.zeros(ROWS, 4, dtype=torch.int32),
    )


def run(wrapper):
    input_ids = torch.zeros(ROWS, dtype=torch.int32, device="npu")
    return wrapper(input_ids, torch.arange(ROWS, device="npu"))


STATES = ("PrefillNoCache", "PrefillCacheHit", "DecodeOnly", "ChunkedPrefill", "SpecDecoding")


@pytest.mark.parametrize(
    ("state", "full_mode", "dp_size", "num_reqs"),
    [
        (state, full_mode, dp_size, num_reqs)
        for state, full_mode, dp_size, num_reqs in itertools.product(STATES, (True, False), (1, 2), (None, 3, 4))
        if dp_size > 1 or num_reqs is None
    ],
)
def test_dispatch(wrapper, paths, forward_context, monkeypatch, state, full_mode, dp_size, num_reqs):
    """Full mode runs every step in xlite; else decode steps, with data parallelism told by tokens and requests."""
    from vllm_ascend.attention.attention_v1 import AscendAttentionState

    monkeypatch.setattr(wrapper, "full_mode", full_mode)
    monkeypatch.setattr(wrapper, "data_parallel_size", dp_size)
    forward_context.batch_descriptor = SimpleNamespace(num_tokens=ROWS, num_reqs=num_reqs)
    forward_context.attn_metadata = {"layer": metadata(AscendAttentionState[state])}
    if not full_mode and dp_size > 1:
        uses_xlite = num_reqs is not None and num_reqs >= ROWS
    else:
        uses_xlite = full_mode or state in ("DecodeOnly", "SpecDecoding")
    result = run(wrapper)
    assert (len(paths.native.calls), len(paths.runnable.calls)) == ((1, 0) if uses_xlite else (0, 1))
    if uses_xlite:
        assert result.untyped_storage().data_ptr() == wrapper.hidden_states.untyped_storage().data_ptr()
        assert result.shape == (ROWS, wrapper.hidden_states.shape[1])


@pytest.mark.parametrize("full_mode", [True, False])
@pytest.mark.parametrize("attn_metadata", [None, {}, {"layer": object()}], ids=["none", "empty", "of another kind"])
def test_without_metadata_of_its_kind_the_runnable_runs(
    wrapper, paths, forward_context, monkeypatch, full_mode, attn_metadata
):
    monkeypatch.setattr(wrapper, "full_mode", full_mode)
    forward_context.attn_metadata = attn_metadata
    assert run(wrapper) == "runnable"


def test_what_xlite_gets(wrapper, paths, forward_context):
    """Lengths and cached lengths of each request, block tables as lists, positions on the device."""
    from vllm_ascend.attention.attention_v1 import AscendAttentionState

    forward_context.batch_descriptor = SimpleNamespace(num_tokens=ROWS, num_reqs=None)
    forward_context.attn_metadata = [{"layer": metadata(AscendAttentionState.DecodeOnly)}]
    run(wrapper)
    runtime, _, attn_meta, kv_caches, freq_cis, _, _ = paths.native.calls[0]
    assert runtime is wrapper.xlite_rt
    assert attn_meta.lens == [1, 1, 1, 1]
    assert attn_meta.cached_lens == [4, 5, 6, 7]
    assert attn_meta.block_tables_cpu == [[0] * 4] * 4
    assert attn_meta.positions.device.type == "npu"
    assert kv_caches is wrapper.kv_caches
    assert freq_cis is wrapper.freq_cis


# Profile run


def test_profile_run_in_full_mode_executes_nothing(upstream, wrapper, paths, forward_context):
    """It returns the buffer of hidden states, and allocates nothing; before the fix the runnable ran."""
    forward_context.in_profile_run = True
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    input_ids, positions = object(), object()
    result = wrapper(input_ids, positions)
    if release_has_the_fix(upstream):
        assert result is wrapper.hidden_states
        assert torch.npu.max_memory_allocated() == before
    else:
        assert result == "runnable"


def test_profile_run_in_decode_only_mode_executes_the_runnable(wrapper, paths, forward_context, monkeypatch):
    """Its prompts will run there."""
    monkeypatch.setattr(wrapper, "full_mode", False)
    forward_context.in_profile_run = True
    assert wrapper(object(), object()) == "runnable"


# Wrapper


def test_pool_is_as_large_as_the_model_asks(upstream, wrapper):
    asked = wrapper.xlite_model.get_tensor_pool_size() << 20
    rows = ledgers(upstream.world)[upstream.result.rank]
    held = [row.num_bytes for row in rows if row.owner == "xlite pool"]
    page = 2 << 20
    assert held == [-(-asked // page) * page]
    assert f"xlite runtime pool size: {asked >> 20} MB" in upstream.result.log_lines


def test_hidden_states_hold_the_largest_step(upstream, wrapper):
    scheduler, model = upstream.config.scheduler_config, upstream.config.model_config
    assert wrapper.hidden_states.shape == (scheduler.max_num_batched_tokens, model.get_hidden_size())
    assert wrapper.hidden_states.dtype == model.dtype


def test_kv_caches_of_all_layers_are_registered(upstream, wrapper):
    runner = upstream.worker.model_runner
    assert wrapper.kv_caches is runner.kv_caches
    assert len(wrapper.kv_caches) == len(layers(upstream))
    for key, value in wrapper.kv_caches:
        assert key.shape == value.shape
        assert key.shape[:2] == (upstream.plan.num_blocks, upstream.config.cache_config.block_size)


def test_attributes_of_the_runnable_are_its_own(upstream, wrapper):
    assert wrapper.compute_logits == wrapper.runnable.compute_logits
    assert wrapper.unwrap() is upstream.worker.model_runner.get_model()
    with pytest.raises(AttributeError, match="XliteWrapper object has no attribute nonsense"):
        wrapper.nonsense  # noqa: B018


# Adapters


@pytest.fixture
def adapter(wrapper):
    return wrapper.adapter_xlite_model


def test_adapter_is_chosen_by_architecture(upstream, adapter):
    from vllm_ascend.xlite import xlite

    expected = {
        "LlamaForCausalLM": xlite.LlamaXliteModel,
        "Qwen2ForCausalLM": xlite.LlamaXliteModel,
        "Qwen3ForCausalLM": xlite.LlamaXliteModel,
        "Qwen3MoeForCausalLM": xlite.QwenMoeXliteModel,
        "Glm4MoeForCausalLM": xlite.Glm4MoeXliteModel,
        "MiniMaxM2ForCausalLM": xlite.MiniMaxM2XliteModel,
    }
    assert expected.items() <= xlite._architecture_strategy_map.items()
    assert type(adapter) is expected[upstream.config.model_config.architectures[0]]


def test_unknown_architecture_is_refused():
    from vllm_ascend.xlite.xlite import get_adapter_xlite_model

    config = SimpleNamespace(model_config=SimpleNamespace(architectures=["NoSuchModel"]))
    with pytest.raises(ValueError, match="NoSuchModel not supported!"):
        get_adapter_xlite_model(nn.Module(), config)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"_supported_architectures": "New"}, "must define _attn_metadata_type"),
        ({"_attn_metadata_type": 3, "_supported_architectures": "New"}, None),
        ({"_attn_metadata_type": int, "_supported_architectures": "LlamaForCausalLM"}, "Duplicate xlite adapter"),
    ],
)
def test_adapters_without_what_they_need_are_refused(attributes, message):
    from vllm_ascend.xlite.xlite import XliteModel

    with pytest.raises((ValueError, TypeError), match=message):
        type("Adapter", (XliteModel,), attributes)


def test_configuration_is_the_model_s(upstream, adapter):
    config, given = upstream.config.model_config.hf_text_config, adapter.xlite_config
    assert given.hidden_size == config.hidden_size
    assert given.n_layers == config.num_hidden_layers
    assert (given.n_heads, given.n_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert given.max_m == upstream.config.scheduler_config.max_num_batched_tokens
    assert given.max_batch_size == upstream.config.scheduler_config.max_num_seqs
    assert given.block_size == upstream.config.cache_config.block_size
    is_moe = hasattr(config, "num_experts")
    assert given.n_dense_layers == (0 if is_moe else config.num_hidden_layers)
    assert given.n_routed_experts == (config.num_experts if is_moe else 0)


def test_decode_only_mode_sizes_for_decode_steps(upstream, adapter, monkeypatch):
    from vllm_ascend.ascend_config import get_ascend_config

    monkeypatch.setattr(get_ascend_config().xlite_graph_config, "full_mode", False)
    other = type(adapter)(adapter.runnable, upstream.config)
    other._build_model_config()
    assert other.xlite_config.max_m == upstream.config.scheduler_config.max_num_seqs


def test_weights_are_the_runnable_s_own(upstream, adapter):
    """xlite reads them where they are; nothing is copied."""
    native, model = adapter.xlite_model, upstream.worker.model_runner.get_model()
    assert native.embed.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert native.norm.data_ptr() == model.model.norm.weight.data_ptr()
    for index, layer in enumerate(layers(upstream)):
        assert native.mha_qkv[index].data_ptr() == layer.self_attn.qkv_proj.weight.data_ptr()
        assert native.attn_out[index].data_ptr() == layer.self_attn.o_proj.weight.data_ptr()
        assert native.mha_q_norm[index].data_ptr() == layer.self_attn.q_norm.weight.data_ptr()
    experts = [layer.mlp.experts.local_num_experts for layer in layers(upstream) if hasattr(layer.mlp, "experts")]
    assert len(native.re_up_gate) == len(native.re_down) == sum(experts)


def test_rotary_cache(upstream, adapter, wrapper):
    """Cosines and sines of every position, beside each other."""
    config, model_config = adapter.xlite_config, upstream.config.model_config
    inverse = config.rope_theta ** -(torch.arange(0, config.rope_head_dim, 2) / config.rope_head_dim)
    angles = torch.arange(model_config.max_model_len).unsqueeze(1) * inverse
    expected = torch.cat((angles.cos(), angles.sin()), dim=1).to(model_config.dtype)
    torch.testing.assert_close(wrapper.freq_cis.cpu(), expected, atol=4e-3, rtol=0)


def test_rotary_cache_of_impossible_sizes_is_refused(upstream, adapter):
    other = type(adapter)(adapter.runnable, upstream.config)
    with pytest.raises(ValueError, match="Invalid RoPE configuration"):
        other._precompute_freqs_cis()


def test_scales_as_the_hardware_wants_them(adapter):
    scale = adapter._transform_deq_scale(torch.tensor([1.5, -2.0], dtype=torch.bfloat16, device="npu"))
    assert scale.dtype == torch.float32
    assert scale.tolist() == [1.5, 0.0, -2.0, 0.0]


def test_tensors_of_nothing_but_zeros(adapter):
    zero, one = torch.zeros(3, device="npu"), torch.ones(3, device="npu")
    assert adapter.all_tensors_zero(None)
    assert adapter.all_tensors_zero([])
    assert adapter.all_tensors_zero([zero, zero])
    assert not adapter.all_tensors_zero([zero, one])
