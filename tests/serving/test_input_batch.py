"""The persistent batch against a model of it that remembers nothing: random additions, removals, preemptions."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.conftest import DENSE
from xlite_runner.config import EngineArgs, ModelConfig, check_and_update_config
from xlite_runner.models.attention_metadata import AscendAttentionState as State
from xlite_runner.serving.output import NewRequestData
from xlite_runner.serving.sampling_params import SamplingParams

MAX_ROWS = 6


def make_batch():
    import torch

    from xlite_runner.input_buffers import InputBuffers
    from xlite_runner.serving.worker.input_batch import InputBatch

    args = EngineArgs(max_num_seqs=MAX_ROWS, max_num_batched_tokens=512, block_size=128)
    config = check_and_update_config(args, ModelConfig.from_hf(DENSE))
    device = torch.device("npu", 0)
    return InputBatch(config, InputBuffers(config, device), device)


def request(name, num_computed=0):
    """Everything in it follows from its number, so that a row tells whose it is."""
    import torch

    from xlite_runner.serving.worker.request_state import CachedRequestState

    data = NewRequestData(
        req_id=f"r{name}",
        prompt_token_ids=[name] * (name % 5 + 1),
        sampling_params=SamplingParams(
            temperature=0.0 if name % 3 == 0 else 0.5 + name,
            top_p=1 / (1 + name % 2),
            top_k=name % 4,
            frequency_penalty=(name % 2) / 2,
            logprobs=name % 3 or None,
            seed=name if name % 4 == 1 else None,
            allowed_token_ids=(name,) if name % 7 == 0 else None,
        ),
        block_ids=[name, name + 1],
        num_computed_tokens=num_computed,
    )
    made = CachedRequestState.of(data, torch.device("npu", 0))
    made.output_token_ids = [name + 1] * (name % 3)
    return made


def check(batch, present):
    """Each request has one row, with its own numbers in every column, and rows have no gaps."""
    assert sorted(batch.rows.values()) == list(range(len(present)))
    assert set(batch.rows) == set(present)
    for req_id, row in batch.rows.items():
        one = present[req_id]
        params, name = one.sampling_params, int(req_id[1:])
        assert batch.requests[row] is one
        assert batch.token_ids[row, : one.num_tokens].tolist() == [*one.prompt_token_ids, *one.output_token_ids]
        assert batch.num_tokens[row] == one.num_tokens
        assert batch.num_prompt_tokens[row] == one.num_prompt_tokens
        assert batch.num_computed_tokens[row] == one.num_computed_tokens
        assert batch.block_table.np[row].tolist()[:2] == one.block_ids
        assert not batch.block_table.np[row, 2:].any()
        assert batch.temperature.np[row] == pytest.approx(0 if name % 3 == 0 else params.temperature)
        assert batch.top_p.np[row] == pytest.approx(1 if params.is_greedy else params.top_p)
        assert batch.top_k.np[row] == ((not params.is_greedy and name % 4) or DENSE["vocab_size"])
    assert not batch.block_table.np[len(present) :].any(), "free rows name the null block"
    check_metadata(batch, [batch.requests[row].sampling_params for row in range(len(present))])


def check_metadata(batch, rows):
    batch.refresh_metadata()
    made = batch.sampling_metadata
    if not rows:
        return
    greedy = [params.temperature == 0 for params in rows]
    assert (made.all_greedy, made.all_random) == (all(greedy), not any(greedy))
    assert (made.temperature is None) == all(greedy)
    assert (made.top_p is None) == all(params.is_greedy or params.top_p == 1 for params in rows)
    assert (made.top_k is None) == all(params.is_greedy or params.top_k == 0 for params in rows)
    assert (made.penalties is None) == all(params.frequency_penalty == 0 for params in rows)
    assert made.max_num_logprobs == max((p.logprobs for p in rows if p.logprobs is not None), default=None)
    seeded = [row for row, params in enumerate(rows) if params.seed is not None and params.temperature]
    assert sorted(made.generators) == seeded
    assert (made.allowed_token_ids_mask is None) == all(params.allowed_token_ids is None for params in rows)
    if made.allowed_token_ids_mask is not None:
        hidden = [DENSE["vocab_size"] - 1 if params.allowed_token_ids else 0 for params in rows]
        assert made.allowed_token_ids_mask.sum(1).tolist() == hidden
    if made.temperature is not None:
        assert made.temperature.tolist() == pytest.approx([params.temperature for params in rows])


@pytest.mark.needs("values")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sets(st.integers(0, 11), max_size=4), st.integers(0, 4)), max_size=8))
def test_rows_after_any_steps(npu_world, steps):
    """Each step some requests leave, as many new ones come as fit, and rows are put in order."""
    batch, present, next_name = make_batch(), {}, 0
    for leaving, num_new in steps:
        for place in sorted(leaving & set(range(len(present))), reverse=True):
            req_id = list(present)[place]
            del present[req_id]
            batch.remove_request(req_id)
        for _ in range(min(num_new, MAX_ROWS - len(present))):
            one = request(next_name, num_computed=next_name % 9)
            present[one.req_id] = one
            batch.add_request(one)
            next_name += 1
        batch.condense()
        check(batch, present)
        num_scheduled = {req_id: 1 + int(req_id[1:]) % 3 for req_id in present}
        batch.reorder(num_scheduled, 1)
        check(batch, present)
        regions = batch._regions(num_scheduled, 1).tolist()
        assert regions == sorted(regions)


def test_new_requests_fill_gaps_and_the_last_move_up(npu_world):
    batch = make_batch()
    requests = [request(name) for name in range(6)]
    for one in requests[:5]:
        batch.add_request(one)
    for name in (1, 3, 2):
        batch.remove_request(f"r{name}")
    batch.add_request(requests[5])
    batch.condense()
    assert [one.req_id for one in batch.requests] == ["r0", "r5", "r4"]


@pytest.mark.needs("values")
def test_forbidden_ends_stay_on_the_device_until_the_minimal_length(npu_world):
    batch, one = make_batch(), request(1)
    one.sampling_params = SamplingParams(min_tokens=3, stop_token_ids=(5, 6))
    batch.add_request(one)
    batch.refresh_metadata()
    minimum = batch.sampling_metadata.min_tokens
    first = minimum.forbidden
    assert [part.tolist() for part in first] == [[0, 0, 0], [5, 6, 7]]  # its stop tokens, and EOS
    batch.append_output(0, [7])
    batch.refresh_metadata()
    assert minimum.forbidden is first
    batch.append_output(0, [7])
    batch.refresh_metadata()
    assert minimum.forbidden is None


def test_metadata_is_made_anew_only_when_rows_changed(npu_world):
    batch = make_batch()
    batch.add_request(request(1))
    batch.refresh_metadata()
    made = batch.sampling_metadata
    batch.append_output(0, [5])
    batch.refresh_metadata()
    assert batch.sampling_metadata is made
    batch.add_request(request(2))
    batch.refresh_metadata()
    assert batch.sampling_metadata is not made


@pytest.mark.parametrize(
    ("num_computed", "query_lens", "num_drafts", "speculates", "chunked", "state"),
    [
        ([0, 0], [5, 1], [0, 0], False, True, State.PREFILL_NO_CACHE),
        ([0], [1], [0], False, True, State.PREFILL_NO_CACHE),
        ([9, 4], [1, 1], [0, 0], False, True, State.DECODE_ONLY),
        ([9, 0], [1, 1], [0, 0], False, True, State.DECODE_ONLY),  # a prompt of one token
        ([9, 4], [1, 1], [0, 0], True, True, State.SPEC_DECODING),
        ([9, 4], [2, 2], [1, 1], True, True, State.SPEC_DECODING),
        ([9, 4], [2, 1], [1, 0], True, True, State.SPEC_DECODING),
        ([9, 4], [1, 7], [0, 0], False, True, State.CHUNKED_PREFILL),
        ([9, 0], [2, 7], [1, 0], True, True, State.CHUNKED_PREFILL),
        ([9, 4], [1, 7], [0, 0], False, False, State.PREFILL_CACHE_HIT),
    ],
)
def test_kind_of_batch(num_computed, query_lens, num_drafts, speculates, chunked, state):
    from xlite_runner.serving.worker.step_inputs import attention_state

    num_valid = [length - drafts for length, drafts in zip(query_lens, num_drafts, strict=True)]
    made = attention_state(num_computed, query_lens, num_valid, speculates=speculates, enable_chunked_prefill=chunked)
    assert made is state
