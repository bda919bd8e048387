"""Start-ups without xlite or with xlite for decode steps only: what they take, and who owns it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("xlite._C")

from xlite_runner import graph_capture
from xlite_runner.config import CUDAGraphMode, ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.graph_capture import MIN_GRAPH_BYTES
from xlite_runner.graph_params import AttentionTask
from xlite_runner.kv_cache.planning import plan_kv_cache
from xlite_runner.models.decoder import CausalLM
from xlite_runner.scenario import load_scenario
from xlite_runner.simulation import build_world
from xlite_runner.worker import NPUWorker, XliteWorker
from xlite_runner.wrapper import XliteWrapper

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.toml"
MOE = ROOT / "examples" / "qwen3-30b-a3b-decode-only.toml"
UPSTREAM_MODELS = ROOT / "tests" / "upstream" / "models"
UPSTREAM = json.loads((ROOT / "tests" / "data" / "upstream_startup" / "figures.json").read_text())
OFF, DECODE_ONLY = {"enabled": False, "full_mode": False}, {"enabled": True, "full_mode": False}
A2 = {"device_profile": "a2-64g", "total_memory_bytes": 65452113920, "free_memory_bytes": 65068760000}
MIB = 1 << 20
TORCH, GRAPHS, XLITE_TABLES = "torch segment", "ACL graph", "xlite tables"
NUM_TINY_GRAPHS = 4

pytestmark = pytest.mark.sim_only("these are particular cards with particular memory")


class Rank:
    """Rank 0 of a start-up, its peers being taken to do as it does.

    Attributes:
        worker: After its start-up, or before it.
        readings: Who owned how many bytes whenever graph capture looked at the free memory.
    """

    def __init__(self, world, config, monkeypatch):
        self.world = world
        self.config = config
        store = dist.HashStore()
        if config.ascend.xlite_graph_config.enabled:
            self.worker = XliteWorker(config, 0, 0, store, ProfilePolicy.SKIP)
        else:
            self.worker = NPUWorker(config, 0, 0, store)
        self.readings = []
        free_memory = graph_capture._free_memory

        def watched():
            self.readings.append(Counter(world.cards[0].ledger.bytes_by_owner()))
            return free_memory()

        monkeypatch.setattr(graph_capture, "_free_memory", watched)

    @property
    def runner(self):
        return self.worker.model_runner

    def load(self):
        self.worker.init_device()
        self.worker.load_model()
        return self

    def start(self, num_blocks=16):
        self.load()
        self.worker.determine_available_memory()
        self.worker.initialize_from_config(plan_kv_cache(self.worker.get_kv_cache_spec(), num_blocks))
        self.worker.compile_or_warm_up_model()
        return self

    def growth(self, first, second):
        """By owner, between two readings."""
        grown = self.readings[second] - self.readings[first]
        assert not self.readings[first] - self.readings[second]
        return {str(owner): num_bytes for owner, num_bytes in grown.items()}


@pytest.fixture
def rank_of(frozen_imports, monkeypatch):
    """``rank_of(scenario file, **settings)``: rank 0 in an active world."""
    worlds = []

    def make(path, *, num_layers=None, model=None, **settings):
        scenario = load_scenario(path, settings)
        published = json.loads(Path(model or scenario.model).read_text())
        if num_layers is not None:
            published["num_hidden_layers"] = num_layers
        config = check_and_update_config(scenario, ModelConfig.from_hf(published))
        worlds.append(build_world(scenario, config, ProfilePolicy.SKIP, lone_rank=0))
        worlds[-1].__enter__()
        return Rank(worlds[-1], config, monkeypatch)

    yield make
    for world in worlds:
        if dist.is_initialized():
            dist.destroy_process_group()
        world.__exit__(None, None, None)


# ---- against upstream


def dense(model, tp_size):
    return {
        "model": UPSTREAM_MODELS / f"{model}.json",
        "tensor_parallel_size": tp_size,
        "enable_expert_parallel": False,
        "max_model_len": 32768,
    }


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ("off_eager_noep_a3", {"xlite_graph_config": OFF, "enable_expert_parallel": False}),
        ("decode_eager_ep_a2", A2),
        ("qwen3_0.6b_tp1_a3", dense("Qwen3-0.6B", 1)),
        ("qwen3_8b_tp2_a3", dense("Qwen3-8B", 2)),
    ],
)
def test_weights_and_peak_activation_of_upstream(rank_of, row, settings):
    rank = rank_of(MOE, enforce_eager=True, **settings).load()
    rank.worker.determine_available_memory()
    non_kv = rank.worker.memory.non_kv
    assert {"weights": non_kv.weights, "peak_activation": non_kv.peak_activation} == UPSTREAM[row]


def test_peak_activation_of_upstream_with_expert_exchange(rank_of):
    """Three layers have about the peak of all; each row that random routing sends here or elsewhere counts 12 KiB."""
    rank = rank_of(MOE, num_layers=3, enforce_eager=True).load()
    rank.worker.determine_available_memory()
    difference = rank.worker.memory.non_kv.peak_activation - UPSTREAM["decode_eager_ep_a3"]["peak_activation"]
    assert abs(difference) < 6 * MIB


# ---- what capture takes


def test_graphs_without_xlite(rank_of, monkeypatch):
    """Their memory is that of graph objects and of one pool; a replay takes none, and tells each layer the lengths."""
    rank = rank_of(TINY, xlite_graph_config=OFF).start()
    assert [entry.num_tokens for entry in rank.runner.acl_graph.entries] == [8, 4, 2, 1]
    grown = rank.growth(0, 1)
    assert set(grown) == {TORCH, GRAPHS}
    assert grown[GRAPHS] == NUM_TINY_GRAPHS * rank.world.profile.acl_graph_bytes.value
    assert rank.worker.memory.graph == sum(grown.values())

    layers = list(rank.runner.attention_layers)
    tasks = rank.runner.acl_graph.graph_params.tasks
    assert {size: [task.layer_name for task in of_size] for size, of_size in tasks.items()} == dict.fromkeys(
        (8, 4, 2, 1), layers
    )
    updates = []
    update = AttentionTask.update
    monkeypatch.setattr(
        AttentionTask,
        "update",
        lambda task, metadata, *args: (
            updates.append((task.layer_name, metadata.seq_lens_list)) or update(task, metadata, *args)
        ),
    )
    allocated = torch.npu.memory_allocated()
    for _ in range(2):
        assert rank.runner._dummy_run(3, uniform_decode=True, profile_seq_lens=7).shape == (4, 64)
    assert updates == [(layer, [7, 7, 7, 0]) for layer in layers] * 2
    assert torch.npu.memory_allocated() == allocated


def test_with_xlite_for_decode_steps_nothing_is_captured(rank_of):
    """Then graph memory is what xlite's first forward takes, and torch for the first attention metadata."""
    rank = rank_of(TINY, xlite_graph_config=DECODE_ONLY).start()
    assert not rank.runner.acl_graph.entries
    grown = rank.growth(0, 1)
    assert set(grown) == {TORCH, XLITE_TABLES}
    assert rank.worker.memory.graph == sum(grown.values())
    first_forward = ("positions", "slot mapping", "lens, cached lens, query starts", "block tables")
    entries = rank.world.cards[0].ledger.entries()
    assert grown[XLITE_TABLES] == sum(entry.num_bytes for entry in entries if entry.label in first_forward)


def count_calls(monkeypatch):
    calls = Counter()

    def count(owner, name, kind):
        original = getattr(owner, name)

        def counted(self, input_ids, positions, context):
            calls[kind, context.cudagraph_runtime_mode, context.attn_metadata is None] += 1
            return original(self, input_ids, positions, context)

        monkeypatch.setattr(owner, name, counted)

    count(CausalLM, "forward", "model")
    count(XliteWrapper, "_forward_xlite", "xlite")
    return calls


NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL


@pytest.mark.parametrize(("dp_size", "warmed_up_by"), [(1, "xlite"), (2, "model")])
def test_who_executes_the_steps_of_capture(rank_of, monkeypatch, dp_size, warmed_up_by):
    """Rows 6, 8 and 9 of the dispatch table: eager steps do not tell data-parallel ranks their number of requests."""
    calls = count_calls(monkeypatch)
    model = UPSTREAM_MODELS / "tiny-qwen3-moe.json"
    rank = rank_of(
        TINY,
        model=model,
        xlite_graph_config=DECODE_ONLY,
        data_parallel_size=dp_size,
        enable_expert_parallel=dp_size > 1,
        gpu_memory_utilization=0.2,
        max_model_len=512,
    ).start()
    assert not rank.runner.acl_graph.entries
    profiled = calls.pop(("model", NONE, True))
    assert profiled == (2 if dp_size > 1 else 1)  # the first one makes the window of the MC2 operators
    assert calls == {(warmed_up_by, NONE, False): NUM_TINY_GRAPHS, ("xlite", FULL, False): NUM_TINY_GRAPHS}


def test_estimate_is_made_of_the_first_two_captures(rank_of):
    environment = {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": 1}
    rank = rank_of(TINY, xlite_graph_config=OFF, environment=environment).load()
    before = torch.npu.memory_stats()["requested_bytes.all.current"]
    rank.worker.determine_available_memory()
    first, second = (sum(rank.growth(2 * each, 2 * each + 1).values()) for each in range(2))
    memory = rank.worker.memory
    assert memory.graph_estimate == first + max(second, MIN_GRAPH_BYTES) * (NUM_TINY_GRAPHS - 1)
    assert memory.available_kv_cache == memory.requested - memory.non_kv.total - memory.graph_estimate
    assert not rank.runner.acl_graph.entries
    assert not rank.runner.kv_caches
    causal_mask = 4 * MIB
    assert torch.npu.memory_stats()["requested_bytes.all.current"] - before == causal_mask
    assert GRAPHS not in rank.world.cards[0].ledger.bytes_by_owner()


def test_eager_engines_with_a_graph_mode_estimate_nothing(rank_of):
    environment = {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": 1}
    rank = rank_of(TINY, xlite_graph_config=DECODE_ONLY, enforce_eager=True, environment=environment).start()
    assert (rank.worker.memory.graph_estimate, rank.worker.memory.graph) == (0, 0)
    assert rank.runner.acl_graph.unwrap() is rank.runner.get_model()


# ---- whole start-ups


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize(("model", "tp_size"), [("tiny-qwen3-moe", 2), ("Qwen3-0.6B", 1)])
def test_start_without_xlite(rank_of, caplog, model, tp_size, enforce_eager):
    """Graphs that upstream cuts out of the compiled model are not captured, which is said."""
    rank = rank_of(
        TINY,
        model=UPSTREAM_MODELS / f"{model}.json",
        num_layers=3,
        tensor_parallel_size=tp_size,
        max_model_len=512,
        gpu_memory_utilization=0.1,
        xlite_graph_config=OFF,
        enforce_eager=enforce_eager,
    ).start()
    assert (rank.worker.memory.graph > 0) == (not enforce_eager)
    told = [line for line in caplog.messages if line.startswith("The model is not compiled: 4 sizes")]
    assert len(told) == (not enforce_eager)
