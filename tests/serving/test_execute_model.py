"""A worker's steps: who executes them, padded to what, with which inputs; and steps that cannot be executed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from npusim.told import ToldTokens
from tests.serving.conftest import DECODE_ONLY, DENSE, FULL, OFF
from tests.serving.steps import Client, run_step, schedule
from xlite_runner.dispatch import Route
from xlite_runner.models.attention_metadata import AscendAttentionState as State
from xlite_runner.serving.sampling_params import SamplingParams

told = pytest.mark.npu_settings(told_values=ToldTokens(DENSE["vocab_size"]))
MASK_BYTES = (4 << 20) + 512  # torch_npu adds 32 bytes to each block, and rounds to 512


def prefill_and_decode(execute, num_reqs, prompt=4, **params):
    clients = [
        Client(f"r{row}", [row] * prompt, SamplingParams(temperature=0.0, **params), blocks=[row + 1])
        for row in range(num_reqs)
    ]
    run_step(execute, clients, {client.req_id: prompt for client in clients})
    run_step(execute, clients, {client.req_id: 1 for client in clients})
    return clients


@pytest.fixture
def routes(monkeypatch):
    """Where forward passes went, in order."""
    from xlite_runner.dispatch import Dispatcher

    taken, route = [], Dispatcher.route
    monkeypatch.setattr(Dispatcher, "route", lambda self, ctx: taken.append(route(self, ctx)) or taken[-1])
    return taken


@told
def test_full_mode_sends_every_step_to_xlite(make_worker, routes):
    prefill_and_decode(make_worker(xlite=FULL).execute_model, 3)
    assert routes == [Route.XLITE, Route.XLITE]


@told
@pytest.mark.needs("atb")
def test_decode_only_mode_sends_mixed_steps_to_the_model(make_worker, routes):
    execute = make_worker(xlite=DECODE_ONLY).execute_model
    clients = prefill_and_decode(execute, 2)
    assert routes == [Route.RUNNABLE, Route.XLITE]
    late = Client("late", [1, 2, 3], blocks=[5])
    run_step(execute, [*clients, late], {"r0": 1, "r1": 1, "late": 3})
    run_step(execute, [*clients, late], {"r0": 1, "r1": 1, "late": 1})
    assert routes[2:] == [Route.RUNNABLE, Route.XLITE]


@told
@pytest.mark.needs("values")
def test_inputs_of_a_mixed_step(make_worker):
    """Decodes come first; positions go on from what is cached; slots follow the block table."""
    worker = make_worker()
    clients = prefill_and_decode(worker.execute_model, 2, prompt=126)
    late = Client("late", [7, 8, 9], blocks=[5])
    run_step(worker.execute_model, [late, *clients], {"late": 2, "r0": 1, "r1": 1})
    for client in clients:
        client.blocks = [client.blocks[0], client.blocks[0] + 5]
    step = schedule([late, *clients], {"late": 1, "r0": 1, "r1": 1})
    steps, buffers = worker.model_runner.steps, worker.model_runner.buffers
    steps.update_states(step)
    for client in clients:
        steps.batch.append_blocks(steps.batch.rows[client.req_id], client.blocks[1:])
    inputs = steps._inputs.build(step.num_scheduled_tokens)
    assert [request.req_id for request in steps.batch.requests] == ["r0", "r1", "late"]
    assert (inputs.query_lens, inputs.seq_lens) == ([1, 1, 1], [129, 129, 3])
    assert inputs.attn_state is State.DECODE_ONLY  # one token of a prompt is like a decode step
    assert inputs.discarded_rows == []
    assert buffers.positions[:3].tolist() == [128, 128, 2]
    assert buffers.batch.slot_mapping[:3].tolist() == [6 * 128, 7 * 128, 5 * 128 + 2]
    assert buffers.input_ids[:3].tolist() == [clients[0].output[-1], clients[1].output[-1], 9]
    assert buffers.query_start_loc[:4].tolist() == [0, 1, 2, 3]
    assert inputs.logits_indices.tolist() == [0, 1, 2]


@told
def test_a_prompt_in_pieces_gives_a_token_with_its_last(make_worker):
    execute = make_worker().execute_model
    client = Client("r", range(50), SamplingParams(seed=3))
    outputs = [run_step(execute, [client], {"r": n}).sampled_token_ids["r"] for n in (20, 20, 10)]
    assert [len(output) for output in outputs] == [0, 0, 1]


@told
def test_a_step_must_be_sampled_before_the_next(make_worker):
    steps = make_worker().model_runner.steps
    with pytest.raises(RuntimeError, match=r"^State error: execute_model\(\) must be called before"):
        steps.sample_tokens()
    step = schedule([Client("r", [1])], {"r": 1})
    assert steps.execute_model(step) is None
    with pytest.raises(RuntimeError, match=r"^State error: sample_tokens\(\) must be called after execute_model"):
        steps.execute_model(step)


@told
def test_a_step_without_requests_does_nothing(make_worker):
    worker = make_worker()
    clients = prefill_and_decode(worker.execute_model, 2)
    output = run_step(worker.execute_model, clients, {}, finished=["r0"])
    assert output.sampled_token_ids == {}
    assert set(worker.model_runner.steps.requests) == {"r1"}
    assert worker.model_runner.steps.batch.num_reqs == 0


@told
@pytest.mark.sim_only("a card computes everything")
def test_what_nobody_computed_and_nobody_told_cannot_be_read(npu_world):
    from npusim.errors import UncomputedValueError

    with pytest.raises(UncomputedValueError):
        torch.empty(3, dtype=torch.bool, device="npu").tolist()
    tokens = torch.empty(2, 1, dtype=torch.int32, device="npu")
    assert tokens.tolist() == tokens.tolist()


@told
@pytest.mark.needs("atb")
def test_decode_steps_replay_graphs_padded_to_their_size(make_worker):
    """Xlite off: three decodes run in the graph of four, the fourth of which reads and writes the null block."""
    worker = make_worker(xlite=OFF, enforce_eager=False)
    runner = worker.model_runner
    runner.graphs.capture_model()
    replayed = []
    for descriptor, entry in runner.acl_graph.entries.items():
        entry.graph.replay = lambda descriptor=descriptor, replay=entry.graph.replay: (
            replayed.append(descriptor.num_tokens),
            replay(),
        )
    prefill_and_decode(worker.execute_model, 3)
    assert replayed == [4]
    assert runner.buffers.batch.slot_mapping[3].item() == -1
    assert not runner.buffers.batch.block_table[3].any()


@told
@pytest.mark.parametrize("xlite", [FULL, DECODE_ONLY, OFF])
def test_a_replica_without_requests_takes_part(make_worker, xlite, routes):
    worker = make_worker(xlite=xlite)
    worker.execute_dummy_batch()
    assert routes == ([Route.XLITE] if xlite is not OFF else [])


@told
@pytest.mark.needs("ledger")
def test_first_step_takes_what_stays(make_worker, npu_world):
    """The causal mask from the caching allocator, and xlite's own tables from the driver.

    And the rows that logits are for, until the next step.
    """
    worker = make_worker()
    tables = npu_world.cards[0].ledger.bytes_by_owner().get("xlite tables", 0)
    before = torch.npu.memory_allocated()
    clients = prefill_and_decode(worker.execute_model, 2)
    assert torch.npu.memory_allocated() - before == MASK_BYTES + 512
    taken = npu_world.cards[0].ledger.bytes_by_owner()["xlite tables"] - tables
    assert taken > 0
    run_step(worker.execute_model, clients, {client.req_id: 1 for client in clients})
    assert torch.npu.memory_allocated() - before == MASK_BYTES + 512
    assert npu_world.cards[0].ledger.bytes_by_owner()["xlite tables"] - tables == taken


@pytest.mark.npu_settings(
    num_devices=2, environment={"XLITE_DISABLE_XCCL": "1"}, told_values=ToldTokens(DENSE["vocab_size"])
)
@pytest.mark.needs("ranks", "ledger")
def test_without_xccl_the_first_step_opens_a_communicator(make_worker, npu_world):
    store = dist.HashStore()
    workers = npu_world.run_ranks(
        [lambda rank=rank: make_worker(DENSE, FULL, rank, store, tensor_parallel_size=2) for rank in range(2)]
    )

    def labels():
        return {
            entry.label.partition(":")[0] for entry in npu_world.cards[0].ledger.entries() if "buffers" in entry.label
        }

    assert labels() == set()
    step = schedule([Client("r", range(5))], {"r": 5})
    npu_world.run_ranks([lambda worker=worker: worker.execute_model(step) for worker in workers])
    assert labels() == {"tp", "xlite TP"}  # of the logits' gathering, and xlite's own
