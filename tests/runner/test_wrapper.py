"""Who executes a forward pass: the nine-row truth table of upstream's wrapper, before and after PR #11380."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("xlite._C")

from xlite_runner.config import ProfilePolicy
from xlite_runner.dispatch import Dispatcher, Route, first_metadata
from xlite_runner.forward_context import BatchDescriptor, ForwardContext
from xlite_runner.models.attention_metadata import AscendAttentionState, AscendMetadata
from xlite_runner.wrapper import REVISIONS, XliteWrapper, make_attn_meta, make_runtime

XLITE, RUNNABLE, HIDDEN_STATES = Route.XLITE, Route.RUNNABLE, Route.HIDDEN_STATES
PREFILL = [state for state in AscendAttentionState if "Prefill" in state.value]
DECODE = [AscendAttentionState.DECODE_ONLY, AscendAttentionState.SPEC_DECODING]


def metadata(state, num_tokens=4):
    return AscendMetadata(
        attn_state=state,
        num_actual_tokens=num_tokens,
        actual_seq_lengths_q=[1, num_tokens],
        seq_lens_list=[5, num_tokens],
        query_start_loc=torch.tensor([0, 1, num_tokens], dtype=torch.int32),
        block_tables=torch.tensor([[3, 0], [7, 0]], dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int32),
        attn_mask=torch.zeros(1, 1, dtype=torch.int8),
    )


def context(attn_metadata, *, profile=False, num_tokens=4, num_reqs=None):
    return ForwardContext(
        batch_descriptor=BatchDescriptor(num_tokens, num_reqs),
        attn_metadata=attn_metadata,
        in_profile_run=profile,
        max_tokens_across_dp=num_tokens,
        padded_num_tokens=num_tokens,
    )


def dispatcher(policy, *, full, dp):
    return Dispatcher(
        full_mode=full,
        data_parallel_size=dp,
        metadata_type=AscendMetadata,
        skips_profile_run=REVISIONS[policy].skips_profile_run,
    )


def rows():
    """(row, in profile run, metadata, full mode, DP sizes, requests of the batch, expected before, expected after)."""
    any_dp, both = (1, 2), (True, False)
    yield 1, True, None, (True,), any_dp, None, RUNNABLE, HIDDEN_STATES
    yield 2, True, None, (False,), any_dp, None, RUNNABLE, RUNNABLE
    yield 3, False, None, both, any_dp, None, RUNNABLE, RUNNABLE
    yield 4, False, "metadata of another backend", both, any_dp, None, RUNNABLE, RUNNABLE
    for state in AscendAttentionState:
        for num_reqs in (None, 4):
            yield 5, False, state, (True,), any_dp, num_reqs, XLITE, XLITE
        yield 8, False, state, (False,), (2,), 4, XLITE, XLITE
        yield 9, False, state, (False,), (2,), None, RUNNABLE, RUNNABLE
        yield 9, False, state, (False,), (2,), 3, RUNNABLE, RUNNABLE
    for state in DECODE:
        yield 6, False, state, (False,), (1,), None, XLITE, XLITE
    for state in PREFILL:
        yield 7, False, state, (False,), (1,), 4, RUNNABLE, RUNNABLE


@pytest.mark.parametrize(("row", "profile", "what", "modes", "dp_sizes", "num_reqs", "before", "after"), list(rows()))
def test_truth_table(row, profile, what, modes, dp_sizes, num_reqs, before, after):
    layers = {"layer": metadata(what) if isinstance(what, AscendAttentionState) else what} if what else None
    for full in modes:
        for dp in dp_sizes:
            ctx = context(layers, profile=profile, num_reqs=num_reqs)
            assert dispatcher(ProfilePolicy.RUNNABLE, full=full, dp=dp).route(ctx) is before, row
            assert dispatcher(ProfilePolicy.SKIP, full=full, dp=dp).route(ctx) is after, row


def test_a_profile_run_with_metadata_is_skipped_too():
    """It never has any upstream; the rule looks at the run, not at the metadata."""
    ctx = context({"layer": metadata(AscendAttentionState.DECODE_ONLY)}, profile=True)
    assert dispatcher(ProfilePolicy.SKIP, full=True, dp=1).route(ctx) is HIDDEN_STATES
    assert dispatcher(ProfilePolicy.SKIP, full=False, dp=1).route(ctx) is RUNNABLE
    assert dispatcher(ProfilePolicy.RUNNABLE, full=False, dp=1).route(ctx) is XLITE


@pytest.mark.parametrize("wrapped", [lambda md: {"a": md}, lambda md: [{"a": md}], lambda md: [md], lambda md: md])
def test_metadata_is_found_in_whatever_upstream_hands_over(wrapped):
    md = metadata(AscendAttentionState.DECODE_ONLY)
    assert first_metadata(wrapped(md)) is md
    assert first_metadata({}) is None


class Recorder:
    """Stands for the model or for xlite's; remembers its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return "the model's hidden states"

    forward = __call__


def stand_in_wrapper(policy, *, full=True):
    """A wrapper around recorders, without a device."""
    wrapper = object.__new__(XliteWrapper)
    wrapper.runnable, native = Recorder(), Recorder()
    wrapper.revision = REVISIONS[policy]
    wrapper.dispatcher = dispatcher(policy, full=full, dp=1)
    wrapper.adapter = SimpleNamespace(native=native, freqs_cis="freqs")
    wrapper.hidden_states = torch.zeros(8, 2)
    wrapper.runtime, wrapper.kv_caches = "runtime", ["kv"]
    return wrapper, wrapper.runnable.calls, native.calls


@pytest.mark.parametrize("policy", list(ProfilePolicy))
def test_profile_run_in_full_mode_calls_the_model_only_before_the_fix(policy):
    wrapper, runnable_calls, native_calls = stand_in_wrapper(policy)
    result = wrapper("ids", "positions", context(None, profile=True))
    assert not native_calls
    assert len(runnable_calls) == (policy is ProfilePolicy.RUNNABLE)
    if policy is ProfilePolicy.SKIP:
        assert result is wrapper.hidden_states  # all rows, whatever they hold


@pytest.mark.parametrize("policy", list(ProfilePolicy))
def test_further_keyword_arguments_reach_the_model_only_after_the_fix(policy):
    wrapper, runnable_calls, _ = stand_in_wrapper(policy)
    if policy is ProfilePolicy.RUNNABLE:
        with pytest.raises(TypeError, match="unexpected keyword argument 'extra'"):
            wrapper("ids", "positions", context(None), extra=1)
    else:
        wrapper("ids", "positions", context(None), extra=1)
        assert runnable_calls[0][1] == {"extra": 1}


def test_lengths_that_xlite_gets():
    positions = torch.arange(4)
    meta = make_attn_meta(metadata(AscendAttentionState.CHUNKED_PREFILL), positions)
    assert (meta.lens, meta.cached_lens) == ([1, 3], [4, 1])
    assert meta.block_tables_cpu == [[3, 0], [7, 0]]
    assert meta.positions is positions


SIZES = {"def_tp_size": 2, "def_dp_size": 1, "moe_tp_size": 1, "moe_ep_size": 2}


@pytest.mark.parametrize(("policy", "moe_sizes"), [(ProfilePolicy.RUNNABLE, (1, 1)), (ProfilePolicy.SKIP, (1, 2))])
@pytest.mark.needs("xlite_double")
def test_the_runtime_learns_the_moe_sizes_only_after_the_fix(policy, moe_sizes, npu_world):
    parallel = SimpleNamespace(local_rank=0, world=SimpleNamespace(rank_in_group=1))
    runtime = make_runtime(REVISIONS[policy], SIZES, parallel)
    assert (runtime.devid, runtime.rank, runtime.tp_size, runtime.dp_size) == (0, 1, 2, 1)
    assert (runtime.moe_tp_size, runtime.moe_ep_size) == moe_sizes
