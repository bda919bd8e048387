"""Serving's worst cases by upstream's code and by xlite_runner's, on the same world: the same audit, to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from tests.upstream.cases import AUDITS, MORE_AUDITS, Case
from tests.upstream.runner_side import configured, policy_of

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]


def audit_by_runner(case: Case, release: str) -> dict[str, Any]:
    """In the form of upstream's result."""
    from xlite_runner.simulation import audit

    scenario, config = configured(case)
    rank = audit(scenario, config, policy_of(release)).ranks[case.rank]
    return json.loads(json.dumps(asdict(rank)))


def params(cases: tuple[Case, ...], kind: str, *marks: pytest.MarkDecorator) -> list:
    return [
        pytest.param(kind, case, release, id=f"{case}-{release}", marks=marks)
        for case in cases
        for release in case.releases
    ]


@pytest.mark.parametrize(
    ("kind", "case", "release"),
    [*params(AUDITS, "audit"), *params(MORE_AUDITS, "more_audits", pytest.mark.slow)],
)
def test_same_audit(upstream_jobs, kind, case, release):
    """Each case's peak and who held it, the terms, the findings, and the verdicts on all sizes of the KV cache."""
    result = upstream_jobs(kind, release)[case.name]
    assert "error" not in result, result["error"]
    ours, theirs = audit_by_runner(case, release), result["rank"]
    beyond = [pop_tensors_of_penalties(own) - pop_tensors_of_penalties(other) for own, other in zip_cases(ours, theirs)]
    assert all(0 <= num_bytes <= ids_of_longest_prompts(case) for num_bytes in beyond)
    assert ours == theirs


def zip_cases(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    return zip(ours["cases"], theirs["cases"], strict=True)


def pop_tensors_of_penalties(step: dict[str, Any]) -> int:
    """Takes a figure away that differs: xlite_runner applies penalties by torch's operators, upstream by Triton's."""
    has_penalties = any(word in step["name"] for word in ("penalties", "everything"))
    return (step.pop("unreserved_tensor_bytes") or 0) if has_penalties else 0


def ids_of_longest_prompts(case: Case) -> int:
    """Bytes of the token ids of as many requests of maximum length as there can be, which penalties work on."""
    scheduler = configured(case)[1].scheduler
    return 8 * scheduler.max_num_seqs * scheduler.max_model_len
