"""Data-parallel ranks of a mixture of experts: they agree on each step, and those without requests take part."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from npusim.told import ToldTokens
from tests.serving.conftest import DECODE_ONLY, DENSE, FULL, MOE, OFF
from tests.serving.steps import Client, schedule
from xlite_runner.config import CUDAGraphMode
from xlite_runner.dispatch import Dispatcher, Route

pytestmark = [
    pytest.mark.npu_settings(num_devices=2, told_values=ToldTokens(DENSE["vocab_size"])),
    pytest.mark.needs("ranks"),
]


@pytest.fixture
def two_replicas(make_worker, npu_world):
    """``two_replicas(xlite)``: workers of two replicas whose experts are spread over both."""

    def make(xlite, **settings):
        store = dist.HashStore()
        settings = {"data_parallel_size": 2, "enable_expert_parallel": True} | settings
        return npu_world.run_ranks(
            [lambda rank=rank: make_worker(MOE, xlite, rank, store, **settings) for rank in range(2)]
        )

    return make


@pytest.fixture
def contexts(monkeypatch):
    """Forward contexts of all ranks, in order."""
    from xlite_runner.runner import NPUModelRunner

    seen, forward = [], NPUModelRunner.forward
    monkeypatch.setattr(NPUModelRunner, "forward", lambda self, ctx: seen.append(ctx) or forward(self, ctx))
    return seen


@pytest.mark.parametrize("xlite", [FULL, DECODE_ONLY, OFF], ids=["full", "decode-only", "off"])
def test_a_replica_without_requests_runs_a_dummy_batch(two_replicas, npu_world, contexts, xlite):
    busy, idle = two_replicas(xlite)
    client = Client("r", range(5))
    step = schedule([client], {"r": 5})
    output, _ = npu_world.run_ranks([lambda: busy.execute_model(step), idle.execute_dummy_batch])
    assert len(output.sampled_token_ids["r"]) == 1
    assert {ctx.batch_descriptor.num_tokens for ctx in contexts} == {1, 5}  # no padding without graphs
    assert [ctx.max_tokens_across_dp for ctx in contexts] == [5, 5]


def test_all_replicas_replay_the_graph_of_the_largest_step_or_none_does(two_replicas, npu_world, contexts):
    workers = two_replicas(DECODE_ONLY, enforce_eager=False)
    clients = [Client(f"r{row}", [row], blocks=[row + 1]) for row in range(3)]

    def steps(num_tokens):
        return [schedule(clients, num_tokens), schedule([], {})]

    def run(step):
        npu_world.run_ranks([lambda: workers[0].execute_model(step), workers[1].execute_dummy_batch])

    run(steps({client.req_id: 1 for client in clients})[0])
    assert [(ctx.cudagraph_runtime_mode, ctx.batch_descriptor.num_tokens) for ctx in contexts] == [
        (CUDAGraphMode.FULL, 4)
    ] * 2
    contexts.clear()
    late = Client("late", range(6), blocks=[7])
    run(schedule([late], {"late": 6}, finished=[client.req_id for client in clients]))
    assert sorted((ctx.cudagraph_runtime_mode.name, ctx.batch_descriptor.num_tokens) for ctx in contexts) == [
        ("NONE", 1),
        ("NONE", 6),
    ]


def test_decode_only_xlite_needs_a_padded_batch_with_several_replicas(two_replicas, npu_world, monkeypatch):
    """Whether a step is one of decodes, each replica would see differently; the padded shape is the same for all."""
    routes, route = [], Dispatcher.route
    monkeypatch.setattr(Dispatcher, "route", lambda self, ctx: routes.append(route(self, ctx)) or routes[-1])
    workers = two_replicas(DECODE_ONLY, enforce_eager=False)
    client = Client("r", [1, 2, 3])
    for num_tokens, expected in ((2, Route.RUNNABLE), (1, Route.XLITE)):
        step = schedule([client], {"r": num_tokens})
        routes.clear()
        npu_world.run_ranks([lambda step=step: workers[0].execute_model(step), workers[1].execute_dummy_batch])
        client.num_computed, client.is_known = num_tokens, True
        assert routes == [expected] * 2
