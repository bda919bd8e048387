"""The audit finds each known risk in a scenario made for it, none in a safe one, and policy ``audited`` covers all."""

from __future__ import annotations

from typing import Any

import pytest

from xlite_runner.audit import account
from xlite_runner.audit.result import AuditResult, Finding, Outcome
from xlite_runner.errors import ReservationError

MIB = 1 << 20
LAYERS, NUM_SEQS, VOCAB_SIZE, BATCHED_TOKENS = 1, 16, 32000, 512
HCCL_BYTES = 2 * 8 * MIB
LOGITS_BYTES = NUM_SEQS * VOCAB_SIZE
"""Of one byte each."""

pytestmark = pytest.mark.sim_only("these are particular cards, and particular models made small")

DECODE_ONLY = {"xlite_graph_config": {"full_mode": False}}
TOP_P_LOGPROBS = {"audit": {"sampling": ["top_p", "logprobs"]}}
FALLBACK = {"audit": {"sampling": [], "fallback_paths": True}}
XCCL_OFF = {"environment": {"XLITE_DISABLE_XCCL": 1}}
TRANSFER = {"kv_transfer_config": {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}}
RISKS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "tensors": (
        TOP_P_LOGPROBS,
        {
            account.RUNNER_BUFFERS: 256 * 544 * 2,  # inputs_embeds alone
            account.XLITE_BUFFERS: 512 * 256 * 2 + 1024 * 128 * 2,
            account.CAUSAL_MASK: 4 * MIB,
            "xlite tables": 4 * 512,  # of the first forward
            "sampler beyond logits (everything)": (22 - 5) * LOGITS_BYTES,
        },
    ),
    "XCCL off and KV transfer": (
        XCCL_OFF | TRANSFER,
        {
            "HCCL communicator xlite TP": HCCL_BYTES,
            account.KV_ALIGNMENT: 2 * LAYERS * 2 * MIB,
            "sampler beyond logits (greedy)": LOGITS_BYTES,
        },
    ),
    "steps without metadata": (
        FALLBACK,
        {
            "HCCL communicator ep": 2 * 200 * MIB,
            "HCCL communicator mc2": HCCL_BYTES,
            "forward pass of the model itself": BATCHED_TOKENS * 256 * 2 * 4,
        },
    ),
    "graph capture": (DECODE_ONLY, {account.GRAPHS: 4 * MIB}),
}
MORE_RISKS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "top-p": ({"audit": {"sampling": ["top_p"]}}, {"sampler beyond logits (top_p)": (18 - 5) * LOGITS_BYTES}),
    "penalties": (
        {"audit": {"sampling": ["penalties"]}},
        {"sampler beyond logits (penalties)": (16 - 5) * LOGITS_BYTES},
    ),
    "allowed tokens": ({"audit": {"sampling": ["allowed_token_ids"]}}, {account.KEPT: LOGITS_BYTES}),
    "prompt log probabilities": (
        {"audit": {"sampling": ["prompt_logprobs"]}},
        {"prompt logprobs": 10 * (BATCHED_TOKENS - 1) * VOCAB_SIZE - 6 * LOGITS_BYTES},
    ),
    "XCCL off between replicas": (
        XCCL_OFF | {"tensor_parallel_size": 1, "data_parallel_size": 2},
        {"HCCL communicator xlite DP": HCCL_BYTES},
    ),
    "drafts": ({"num_speculative_tokens": 1}, {"rejection sampler beyond logits (greedy)": 10 * LOGITS_BYTES}),
}


def finding(result: AuditResult, subject: str) -> Finding:
    """The findings with this subject as one."""
    found = [finding for finding in result.worst_rank.findings if finding.subject == subject]
    assert found, [finding.subject for finding in result.worst_rank.findings]
    return max(found, key=lambda finding: finding.num_bytes or 0)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        *(pytest.param(*risk, id=name) for name, risk in RISKS.items()),
        *(pytest.param(*risk, id=name, marks=pytest.mark.slow) for name, risk in MORE_RISKS.items()),
    ],
)
def test_unreserved_memory_is_found_and_audited_reserves_it(audit_of, overrides, expected):
    result = audit_of("skip", **overrides)
    assert not result.is_safe
    for subject, least_bytes in expected.items():
        assert finding(result, subject).num_bytes >= least_bytes, subject
        assert finding(result, subject).grade
    audited = audit_of("audited", **overrides)
    assert audited.is_safe
    assert audited.worst_rank.findings == ()


def test_bytes_that_nothing_but_their_own_term_explains(audit_of):
    """Two buffers of 8 MiB, the window, the control memory; 2 MiB for each KV tensor."""
    xccl_off = audit_of("skip", **XCCL_OFF, **TRANSFER)
    others = sum(
        row.num_bytes for row in xccl_off.profile.ranks[0].ledger if row.label == "runtime, first communicator"
    )
    found = finding(xccl_off, "HCCL communicator xlite TP")
    assert HCCL_BYTES + MIB < found.num_bytes < HCCL_BYTES + MIB + others
    assert found.grade == "calibrated"  # the control memory
    transfer = finding(xccl_off, account.KV_ALIGNMENT)
    assert transfer.num_bytes == 2 * LAYERS * (2 * MIB + 512)  # and torch's own rounding


@pytest.mark.slow
def test_what_upstream_proposes_to_fill_the_card_with_runs_out_of_memory(audit_of):
    """Known before, from an audit with a small cache; and found by a start-up that does it."""
    many = {"max_num_seqs": 256, **TOP_P_LOGPROBS}
    (_, _, full) = audit_of("skip", **many).worst_rank.verdicts
    assert full.outcome is Outcome.OUT_OF_MEMORY
    size = int(full.setting.partition("=")[2])
    result = audit_of("skip", **many, kv_cache_memory_bytes=size)
    (as_given,) = result.worst_rank.verdicts
    assert as_given.outcome is Outcome.OUT_OF_MEMORY
    failure = result.worst_rank.findings[0]
    assert failure.subject == "serving fails"
    assert failure.source.startswith("OutOfMemoryError: NPU out of memory.")
    assert as_given.margin_bytes == pytest.approx(full.margin_bytes, abs=20 * MIB)
    with pytest.raises(
        ReservationError, match=rf"--kv-cache-memory={size} .* at most --kv-cache-memory=(\d+)"
    ) as refusal:
        audit_of("audited", **many, kv_cache_memory_bytes=size)
    at_most = int(str(refusal.value).rpartition("--kv-cache-memory=")[2].split()[0])
    assert audit_of("audited", **many, kv_cache_memory_bytes=at_most).is_safe


def test_drafts_exceed_what_decode_only_mode_is_made_for(audit_of):
    result = audit_of("skip", **DECODE_ONLY, num_speculative_tokens=1)
    assert not result.is_safe
    failure = finding(result, "serving fails")
    assert (failure.num_bytes, failure.when) == (None, "decodes with drafts, greedy")
    assert "invalid attnMeta batched tokens(32) > maxBatchedTokens(16)" in failure.source


@pytest.mark.parametrize(("level", "is_safe"), [(0, True), pytest.param(1, True, marks=pytest.mark.slow), (2, False)])
def test_tables_that_a_deep_sleep_leaves_undefined(audit_of, level, is_safe):
    result = audit_of("skip", kv_cache_memory_bytes=1 << 30, audit={"sampling": [], "sleep_level": level})
    assert result.is_safe is is_safe
    subjects = [finding.subject for finding in result.worst_rank.findings]
    assert subjects == ([] if is_safe else ["xlite's freqs_cis is undefined after a sleep of level 2"])


@pytest.mark.slow
def test_a_sleep_without_xlite_leaves_nothing_undefined(audit_of):
    native = {"xlite_graph_config": {"enabled": False, "full_mode": False}, "enforce_eager": True}
    result = audit_of("skip", **native, kv_cache_memory_bytes=1 << 30, audit={"sampling": [], "sleep_level": 2})
    assert result.is_safe


@pytest.mark.parametrize("risk", list(RISKS))
@pytest.mark.parametrize("policy", [pytest.param("runnable", marks=pytest.mark.slow), "skip", "audited"])
def test_terms_add_up(audit_of, policy, risk):
    """What was needed is what was in use; what was reserved is the requested memory, less a fraction of a byte."""
    for rank in audit_of(policy, **RISKS[risk][0]).ranks:
        verdict = rank.verdicts[0]
        assert sum(term.needed_bytes for term in rank.terms) == verdict.in_use_bytes
        assert verdict.in_use_bytes == max(case.in_use_bytes for case in rank.cases)
        assert 0 <= verdict.budget_bytes - sum(term.reserved_bytes for term in rank.terms) <= 1


@pytest.mark.parametrize("risk", list(RISKS))
def test_vendor_counters_say_what_the_ledger_says(audit_of, risk):
    """The figure that a card gives, too, is the exact peak of the simulated one."""
    for rank in audit_of("skip", **RISKS[risk][0]).ranks:
        for case in rank.cases:
            own = sum(row.num_bytes for row in case.peak_ledger if row.owner not in ("driver context", "other process"))
            assert case.in_use_bytes == own, case.name


@pytest.mark.slow
def test_an_idle_replica_takes_part(audit_of):
    result = audit_of("skip", tensor_parallel_size=1, data_parallel_size=2)
    for rank in result.ranks:
        assert "decodes on one data-parallel rank" in [case.name for case in rank.cases]
        assert all(case.error is None for case in rank.cases)


@pytest.mark.slow
def test_without_a_ledger_the_bytes_are_the_same_and_the_owner_is_not_known(start_engine, audit_of):
    """As on a card."""
    with_ledger = audit_of("skip", **XCCL_OFF, **TRANSFER).ranks[0]
    _, engine = start_engine("skip", **XCCL_OFF, **TRANSFER)
    rank, _ = engine.audit()
    assert (rank.verdicts, rank.terms) == (with_ledger.verdicts, with_ledger.terms)
    unknown = sum(found.num_bytes for found in rank.findings if found.subject == account.NON_TORCH_OF_SERVING)
    named = ("xlite tables", "HCCL communicator xlite TP")
    assert unknown == sum(found.num_bytes for found in with_ledger.findings if found.subject in named) > HCCL_BYTES
