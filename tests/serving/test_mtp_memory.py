"""The published configuration with a drafter: what it brings back, and what a step takes."""

from __future__ import annotations

import pytest

from tests.serving.steps import Client, run_step
from xlite_runner.serving.sampling_params import SamplingParams

MIB = 1 << 20
NUM_REQS, VOCAB_SIZE, HIDDEN_SIZE = 64, 151936, 2048
LOGITS_MIB = NUM_REQS * VOCAB_SIZE / MIB

pytestmark = [pytest.mark.slow, pytest.mark.sim_only("this is a particular card with a particular model")]


def test_native_communicators_come_back(started_with_drafter):
    """The profile run of the fixed wrapper skips the model, but not the drafter, which is a model of its own."""
    labels = {entry.label for entry in started_with_drafter.world.cards[0].ledger.entries()}
    assert {label.partition(":")[0] for label in labels if "buffers" in label} == {"tp", "ep", "mc2"}


@pytest.mark.parametrize(
    ("params", "units"), [({"temperature": 0.0}, 22), ({}, 26 + 1), ({"top_p": 0.9}, 26 + 1)], ids=["greedy", "", "p"]
)
def test_peak_of_a_decode_step(started_with_drafter, params, units):
    """The rejection sampler's peak (see test_sampler_memory) over two rows of hidden states for each request."""
    clients = [
        Client(f"{units}{params}{row}", [row], SamplingParams(**params), blocks=[row + 1]) for row in range(NUM_REQS)
    ]
    memory = []

    def execute(step):
        output, *figures = started_with_drafter.execute(step)
        memory.append(figures)
        return output

    drafts = run_step(execute, clients, {client.req_id: 1 for client in clients}).draft_token_ids
    run_step(execute, clients, {client.req_id: 2 for client in clients}, drafts)
    run_step(execute, [], {}, finished=[client.req_id for client in clients])
    peak, after = memory[1]
    hidden_mib = 2 * NUM_REQS * HIDDEN_SIZE * 2 / MIB
    assert peak / MIB == pytest.approx(units * LOGITS_MIB + hidden_mib, abs=0.05)
    assert after == 0
