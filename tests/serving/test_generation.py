"""Tokens of tiny models, computed: by xlite, by the model itself, in chunks, after preemption, on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.serving.conftest import DECODE_ONLY, DENSE, FULL, MOE, OFF
from tests.serving.steps import Client, generate, run_step

pytestmark = [pytest.mark.npu_settings(values="real"), pytest.mark.needs("values")]


def clients(lengths=(5, 130, 40)):
    """Requests with prompts of these lengths, each with two blocks of its own."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(512, (length,), generator=generator).tolist() for length in lengths]
    return [Client(f"r{row}", prompt, blocks=[2 * row + 1, 2 * row + 2]) for row, prompt in enumerate(prompts)]


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_xlite_and_the_model_itself_give_the_same_tokens(make_worker, model):
    """In full mode all by xlite, in chunks of the prompts or not; decode-only mixes both; off is the model alone."""
    runs = [(OFF, None), (FULL, None), (FULL, 37), (DECODE_ONLY, 37)]
    tokens = [generate(make_worker(model, xlite).execute_model, clients(), 6, chunk) for xlite, chunk in runs]
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
    assert len({token for output in tokens[0].values() for token in output}) > 6


def test_a_preempted_request_gives_the_same_tokens(make_worker):
    """It comes back with other blocks, computes its prompt and output anew, and goes on."""
    expected = generate(make_worker().execute_model, clients(), 6)
    requests = clients()
    execute = make_worker().execute_model
    generate(execute, requests, 3)
    victim, others = requests[1], [requests[0], requests[2]]
    generate(execute, others, 5)
    victim.num_computed, victim.blocks, victim.is_preempted = 0, [9, 10], True
    run_step(execute, requests, {"r1": 100})
    assert generate(execute, requests, 6, chunk=30) == expected


@pytest.mark.npu_settings(values="real", num_devices=2)
@pytest.mark.npu_profile("a2-64g")
@pytest.mark.needs("ranks")
@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_two_ranks_give_the_same_tokens_by_xlite_and_without(make_worker, npu_world, model):
    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": model is MOE}

    def tokens(xlite):
        store = dist.HashStore()
        workers = npu_world.run_ranks(
            [lambda rank=rank: make_worker(model, xlite, rank, store, **settings) for rank in range(2)]
        )

        def execute(step):
            outputs = npu_world.run_ranks([lambda worker=worker: worker.execute_model(step) for worker in workers])
            assert outputs[0] == outputs[1]
            return outputs[0]

        generated = generate(execute, clients((5, 20)), 4)
        npu_world.run_ranks([dist.destroy_process_group] * 2)
        return generated

    assert tokens(FULL) == tokens(OFF)


@pytest.mark.parametrize(
    "xlite",
    [
        pytest.param(FULL, id="full"),
        pytest.param(DECODE_ONLY, id="decode-only", marks=pytest.mark.slow),
        pytest.param(OFF, id="off", marks=pytest.mark.slow),
    ],
)
def test_drafts_do_not_change_greedy_tokens(make_worker, xlite):
    """A drafter with weights of no meaning is rejected nearly always; what is accepted is what would have come."""
    expected = generate(make_worker(xlite=xlite).execute_model, clients(), 8)
    execute = make_worker(xlite=xlite, num_speculative_tokens=1).execute_model
    requests = clients()
    drafts, num_tokens = {}, {client.req_id: len(client.prompt) for client in requests}
    while any(len(client.output) < 8 for client in requests):
        output = run_step(execute, requests, num_tokens, drafts)
        drafts = dict(output.draft_token_ids)
        # Now and then a draft that is right: the token that will come.
        for client in requests:
            place = len(client.output)
            if place % 2 and place < 7:
                drafts[client.req_id] = [expected[client.req_id][place]]
        num_tokens = {client.req_id: 2 for client in requests}
    assert {client.req_id: client.output[:8] for client in requests} == expected
