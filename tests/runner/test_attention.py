"""Attention outside xlite: a tiny model step by step over a KV cache, against plain attention over whole sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from xlite_runner.batch_execution import BatchExecution
from xlite_runner.config import CUDAGraphMode, EngineArgs, ModelConfig, check_and_update_config
from xlite_runner.errors import KVCacheError, UnsupportedDeviceError
from xlite_runner.forward_context import AscendDeviceType, BatchDescriptor
from xlite_runner.kv_cache.planning import plan_kv_cache
from xlite_runner.models.attention import Attention
from xlite_runner.models.attention_metadata import AscendAttentionMetadataBuilder, AscendAttentionState
from xlite_runner.parallel_state import initialize_parallel_state
from xlite_runner.runner import NPUModelRunner

STATE = AscendAttentionState
BLOCK_SIZE = 128
MODEL = {
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
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
}
BF16 = {"atol": 2e-2, "rtol": 2e-2}

real_values = pytest.mark.npu_settings(values="real")


class Request:
    """A sequence, the KV-cache blocks that it has, and how many of its tokens have been computed."""

    def __init__(self, num_tokens, blocks, seed):
        generator = torch.Generator().manual_seed(seed)
        self.token_ids = torch.randint(MODEL["vocab_size"], (num_tokens,), dtype=torch.int32, generator=generator)
        self.blocks = blocks
        self.num_computed = 0

    def slots(self, start, end):
        return [self.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(start, end)]


@pytest.fixture
def runner(frozen_imports, npu_device):
    """A runner without xlite on one device, with weights that let attention be seen in the result."""
    config = check_and_update_config(
        EngineArgs(max_num_seqs=4, max_num_batched_tokens=256, enforce_eager=True), ModelConfig.from_hf(MODEL)
    )
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = NPUModelRunner(config, initialize_parallel_state(config.parallel, 0, 0, is_moe=False), npu_device)
        with torch.inference_mode():
            made.load_model()
            for parameter in made.get_model().parameters():
                parameter.data.uniform_(-0.2, 0.2)
        yield made
    finally:
        dist.destroy_process_group()


def run_step(runner, state, requests, query_lens):
    """Hidden states of each request's next tokens."""
    starts = [request.num_computed for request in requests]
    ends = [start + num_tokens for start, num_tokens in zip(starts, query_lens, strict=True)]
    spans = list(zip(requests, starts, ends, strict=True))
    num_tokens = sum(query_lens)
    buffers = runner.buffers
    buffers.input_ids[:num_tokens] = torch.cat([request.token_ids[start:end] for request, start, end in spans])
    buffers.positions[:num_tokens] = torch.cat([torch.arange(start, end) for _, start, end in spans])
    slots = [slot for request, start, end in spans for slot in request.slots(start, end)]
    buffers.batch.slot_mapping[:num_tokens] = torch.tensor(slots, dtype=torch.int32)
    for row, request in enumerate(requests):
        buffers.batch.block_table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        request.num_computed = ends[row]
    metadata = runner.metadata_builder.build(
        attn_state=state,
        query_lens=query_lens,
        seq_lens=ends,
        num_actual_tokens=num_tokens,
        block_tables=buffers.batch.block_table[: len(requests)],
        slot_mapping=buffers.batch.slot_mapping[:num_tokens],
    )
    return call_model(runner, num_tokens, dict.fromkeys(runner.get_kv_cache_spec(), metadata)).split(query_lens)


def call_model(runner, num_tokens, metadata):
    with torch.inference_mode():
        execution = BatchExecution(CUDAGraphMode.NONE, BatchDescriptor(num_tokens), num_tokens)
        return runner.forward(runner.make_context(execution, metadata)).cpu()


def whole_sequence(runner, request, monkeypatch):
    """Hidden states of all tokens of a request at once, its attention computed by torch on the host."""

    def forward(self, query, key, value, context):
        heads = (x.cpu().float().view(query.size(0), -1, self.head_size).transpose(0, 1) for x in (query, key, value))
        output = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return output.transpose(0, 1).flatten(1).to(query.dtype).to(query.device)

    num_tokens = len(request.token_ids)
    runner.buffers.input_ids[:num_tokens] = request.token_ids
    runner.buffers.positions[:num_tokens] = torch.arange(num_tokens)
    with monkeypatch.context() as patch:
        patch.setattr(Attention, "forward", forward)
        return call_model(runner, num_tokens, None)


@real_values
@pytest.mark.needs("values")
def test_steps_over_the_cache_equal_plain_attention(runner, monkeypatch):
    """The first request fills its first block and goes on in another one, in front of it in the cache."""
    requests = [Request(140, [5, 3], seed=1), Request(9, [1], seed=2)]
    expected = [whole_sequence(runner, request, monkeypatch) for request in requests]
    runner.initialize_kv_cache(plan_kv_cache(runner.get_kv_cache_spec(), num_blocks=6))
    steps = (
        (STATE.PREFILL_NO_CACHE, [110, 3]),
        (STATE.CHUNKED_PREFILL, [20, 1]),
        (STATE.PREFILL_CACHE_HIT, [8, 3]),
        (STATE.DECODE_ONLY, [1, 1]),
        (STATE.DECODE_ONLY, [1, 1]),
    )
    computed = [run_step(runner, state, requests, query_lens) for state, query_lens in steps]
    for row, whole in enumerate(expected):
        torch.testing.assert_close(torch.cat([step[row] for step in computed]), whole, **BF16)


@real_values
@pytest.mark.needs("values")
def test_each_token_is_written_to_its_slot_and_to_no_other(runner):
    runner.initialize_kv_cache(plan_kv_cache(runner.get_kv_cache_spec(), num_blocks=3))
    run_step(runner, STATE.PREFILL_NO_CACHE, [Request(4, [2], seed=3)], [4])
    for caches in runner.kv_caches:
        for cache in caches:
            written = cache.flatten(2).abs().sum(-1).flatten().cpu() > 0
            assert written.nonzero().flatten().tolist() == [2 * BLOCK_SIZE + place for place in range(4)]


def test_layers_get_the_cache_of_their_name_and_lose_it(runner):
    runner.initialize_kv_cache(plan_kv_cache(runner.get_kv_cache_spec(), num_blocks=2))
    layers = runner.attention_layers
    assert list(layers) == ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    for layer, (keys, values) in zip(layers.values(), runner.kv_caches, strict=True):
        assert layer.kv_cache[0] is keys
        assert layer.kv_cache[1] is values
        assert keys.shape == values.shape == (2, BLOCK_SIZE, 2, 128)
    before = torch.npu.memory_allocated()
    del layer, keys, values
    runner.drop_kv_cache()
    assert before - torch.npu.memory_allocated() >= 2 * 2 * 2 * BLOCK_SIZE * 2 * 128 * 2
    with pytest.raises(KVCacheError, match=r"^model\.layers\.0\.self_attn\.attn: no KV cache was initialised"):
        run_step(runner, STATE.DECODE_ONLY, [Request(1, [0], seed=4)], [1])


def test_other_generations_have_attention_of_their_own(runner):
    runner.initialize_kv_cache(plan_kv_cache(runner.get_kv_cache_spec(), num_blocks=2))
    for layer in runner.attention_layers.values():
        layer.device_type = AscendDeviceType._310P
    with pytest.raises(UnsupportedDeviceError, match="is there for A2 and A3, not for 310P"):
        run_step(runner, STATE.DECODE_ONLY, [Request(1, [0], seed=5)], [1])


def test_the_causal_mask_is_made_once_when_it_is_first_needed(npu_device):
    builder = AscendAttentionMetadataBuilder(npu_device)
    before = torch.npu.memory_stats()["requested_bytes.all.current"]
    mask = builder.attn_mask
    assert torch.npu.memory_stats()["requested_bytes.all.current"] - before == 4 << 20
    assert builder.attn_mask is mask
    assert torch.equal(mask.cpu(), torch.triu(torch.ones(2048, 2048, dtype=torch.int8), diagonal=1))


@pytest.mark.needs("values")
def test_lengths_and_places_in_the_metadata(npu_device):
    builder = AscendAttentionMetadataBuilder(npu_device)
    metadata = builder.build(
        attn_state=STATE.CHUNKED_PREFILL,
        query_lens=[3, 1, 2],
        seq_lens=[10, 1, 130],
        num_actual_tokens=6,
        block_tables=torch.zeros(3, 4, dtype=torch.int32, device=npu_device),
        slot_mapping=torch.arange(8, dtype=torch.int32, device=npu_device),
    )
    assert metadata.actual_seq_lengths_q == [3, 4, 6]
    assert metadata.seq_lens_list == [10, 1, 130]
    assert metadata.query_start_loc.cpu().tolist() == [0, 3, 4, 6]
    assert metadata.slot_mapping.cpu().tolist() == list(range(6))
    assert replace(metadata, attn_state=STATE.DECODE_ONLY).attn_mask is metadata.attn_mask
