"""The memory of models: weights and every layer's peak, against what unmodified upstream makes.

``tests/data/upstream_profile`` holds one file per start-up of upstream: the tensors that loading leaves behind, and at
the start of each layer how many bytes of tensors are alive and how many were at most since the last mark. Bytes are
those asked for, so that neither the allocator's rounding nor operator workspaces enter. Models here have three layers,
which is enough to see the first, a middle and the last one.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xlite_runner.config import EngineArgs, ModelConfig, check_and_update_config
from xlite_runner.forward_context import (
    AscendDeviceType,
    BatchDescriptor,
    MoECommType,
    create_forward_context,
    mc2_tokens_capacity,
)
from xlite_runner.models.loader import build_model
from xlite_runner.models.rotary import CosSinBuffers
from xlite_runner.parallel_state import initialize_parallel_state

RECORDS = {
    path.stem: json.loads(path.read_text()) for path in Path(__file__).parents[1].glob("data/upstream_profile/*")
}
NUM_LAYERS = 3


class Meter:
    """Bytes of tensors on the device above a base, and their peak since the last mark."""

    def __init__(self, device):
        self.device = device
        self.base = self._stats("current")
        torch.npu.reset_peak_memory_stats(device)
        self.marks = []

    def _stats(self, kind):
        return torch.npu.memory_stats(self.device)[f"requested_bytes.all.{kind}"]

    def mark(self, phase, name):
        self.marks.append((phase, name, self._stats("current") - self.base, self._stats("peak") - self.base))
        torch.npu.reset_peak_memory_stats(self.device)


class Rank:
    """One rank's model, taken through the steps of a profile run."""

    def __init__(self, record, rank, store):
        model = ModelConfig.from_hf({**record["model"], "num_hidden_layers": NUM_LAYERS})
        self.config = check_and_update_config(EngineArgs(enforce_eager=True, **record["engine_args"]), model)
        self.device = torch.device("npu", rank)
        torch.npu.set_device(self.device)
        parallel = self.config.parallel
        dist.init_process_group("hccl", store=store, rank=rank, world_size=parallel.world_size_across_dp)
        try:
            self.groups = initialize_parallel_state(parallel, rank, rank, is_moe=model.moe is not None)
            self.cos_sin = CosSinBuffers(self.max_num_tokens, model.head_dim, torch.bfloat16, self.device)
            self.mask = torch.zeros(self.max_num_tokens, dtype=torch.bool, device=self.device) if model.moe else None
            self.input_ids = torch.zeros(self.max_num_tokens, dtype=torch.int32, device=self.device)
            self.positions = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=self.device)
            loading = Meter(self.device)
            self.model = build_model(self.config, self.groups, self.device)
            loading.mark("load", "weights")
            self.weights_bytes = loading.marks[0][2]
            self.received_rows: list[int] = []
            self.marks = self.profile()
        finally:
            dist.destroy_process_group()

    @property
    def max_num_tokens(self):
        return self.config.scheduler.max_num_batched_tokens

    def profile(self):
        self.meter = Meter(self.device)
        self.watch()
        with torch.inference_mode():
            if self.device_type is AscendDeviceType.A3 and self.config.model.moe:
                self.step("mc2", mc2_tokens_capacity(self.config))
            hidden_states = self.step("step", self.max_num_tokens)
            rows = torch.arange(self.config.scheduler.max_num_seqs, device=self.device)
            selected = hidden_states[rows]
            del rows
            logits = self.model.compute_logits(selected)
            del selected
            self.meter.mark("sampler", "dummy_sampler_run")
            self.logits_shape = tuple(logits.shape)
            del hidden_states, logits
            self.meter.mark("end", "nothing held")
        return self.meter.marks

    @property
    def device_type(self):
        return AscendDeviceType.of(torch.npu.get_soc_version())

    def step(self, phase, num_tokens):
        self.phase = phase
        positions = self.positions[:num_tokens]
        cos, sin = self.cos_sin.update(self.model.model.layers[0].self_attn.rotary_emb.cos_sin_cache, positions)
        context = create_forward_context(
            self.config,
            self.device_type,
            BatchDescriptor(num_tokens),
            in_profile_run=True,
            reserved_mc2_mask=self.mask,
            cos=cos,
            sin=sin,
        )
        torch.npu.reset_peak_memory_stats(self.device)
        hidden_states = self.model(self.input_ids[:num_tokens], positions, context)
        self.meter.mark(phase, "dummy_run")
        return hidden_states

    def watch(self):
        """Mark the start of each layer and of the final norm; note how many rows each layer is sent."""
        for index, layer in enumerate(self.model.model.layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self.meter.mark(self.phase, f"layer {index}"))
        norm = self.model.model.norm
        add_and_norm = norm.add_and_norm

        def final_norm(*args):
            self.meter.mark(self.phase, "final norm")
            return add_and_norm(*args)

        norm.add_and_norm = final_norm
        if self.config.model.moe and self.config.parallel.moe_ep_size > 1:
            dispatcher = self.model.model.layers[0].mlp.experts.comm_methods[MoECommType.ALLTOALL].token_dispatcher
            exchange = dispatcher._exchange

            def noting_exchange(topk_ids):
                exchanged = exchange(topk_ids)
                self.received_rows.append(sum(exchanged.output_splits))
                return exchanged

            dispatcher._exchange = noting_exchange


def run_ranks(request, record, function):
    """``function(rank, store)`` on every rank: on simulated devices; on a card, of the first rank only."""
    num_ranks = record["engine_args"]["tensor_parallel_size"]
    store = dist.HashStore()
    if request.config.getoption("--device", "sim") == "npu":
        gc.collect()  # the model before
        return [function(0, store)]
    from npusim.ops import operator
    from npusim.world import SimWorld

    profile = {"A2": "a2-64g", "A3": "a3-64g"}[record["device"]]
    with pytest.MonkeyPatch.context() as patch, SimWorld(profile, num_devices=num_ranks, environment={}) as world:
        patch.setattr(operator, "take_workspace", lambda *_, **__: None)  # the records have none either
        return world.run_ranks([lambda rank=rank: function(rank, store) for rank in range(num_ranks)])


def needs(record):
    """What the start-up needs of the device under test."""
    if record["engine_args"]["tensor_parallel_size"] > 1:
        yield "lone_rank"
    if "num_experts" in record["model"] and record["device"] == "A3":
        yield "values"  # how many rows go to which rank


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.needs(*needs(record))) for name, record in sorted(RECORDS.items())],
)
def run(request) -> tuple[dict[str, Any], list[Rank]]:
    """A record of upstream, and the same start-up here."""
    record = RECORDS[request.param]
    return record, run_ranks(request, record, lambda rank, store: Rank(record, rank, store))


@pytest.mark.needs("vllm_ascend")
def test_weights(run):
    """Every tensor that upstream keeps after loading, and no other; scaled to the number of layers."""
    record, ranks = run
    all_layers = record["model"]["num_hidden_layers"]
    expected = sum(
        (count // all_layers * NUM_LAYERS + count % all_layers) * num_bytes
        for num_bytes, count in record["weight_tensors"]
    )
    assert [rank.weights_bytes for rank in ranks] == [expected] * len(ranks)


@pytest.mark.needs("vllm_ascend", "no_workspaces")
def test_bytes_alive_and_peak_of_every_layer(run):
    record, ranks = run
    upstream = {(phase, name): (alive, peak) for phase, name, alive, peak in record["marks"]}
    for rank in ranks:
        assert {mark[:2] for mark in rank.marks[:-1]} == {key for key in upstream if key[1] != "layer 3"}
        for phase, name, alive, peak in rank.marks[:-1]:
            where = "layer 3" if name == "final norm" else name  # here the last layer, there one in the middle
            upstream_alive, upstream_peak = upstream[phase, where]
            if phase == "step" and rank.received_rows and name in ("layer 1", "layer 2", "final norm"):
                index = int(where.removeprefix("layer ")) - 1
                more_rows = rank.received_rows[index] - record["received_rows"][index]
                # Three tensors of received rows are alive at the peak, and one permutation.
                upstream_peak += more_rows * (3 * 2 * record["model"]["hidden_size"] + 4)
            assert (phase, name, alive, peak) == (phase, name, upstream_alive, upstream_peak)


@pytest.mark.needs("vllm_ascend")
def test_logits_cover_the_vocabulary_and_nothing_stays_alive(run):
    record, ranks = run
    for rank in ranks:
        assert rank.logits_shape == (record["engine_args"]["max_num_seqs"], record["model"]["vocab_size"])
        assert rank.marks[-1][:3] == ("end", "nothing held", 0)


@pytest.mark.needs("vllm_ascend")
def test_kv_cache_specs(run):
    record, ranks = run
    model, tp_size = record["model"], record["engine_args"]["tensor_parallel_size"]
    specs = ranks[0].model.kv_cache_specs()
    assert list(specs) == [f"model.layers.{index}.self_attn.attn" for index in range(NUM_LAYERS)]
    head_dim = model.get("head_dim", model["hidden_size"] // model["num_attention_heads"])
    assert {spec.page_size_bytes for spec in specs.values()} == {
        2 * 128 * model["num_key_value_heads"] // tp_size * head_dim * 2
    }
