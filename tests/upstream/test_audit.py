"""Serving's worst cases by upstream's code and by xlite_runner's, on the same world: the same audit, to the byte."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from tests.upstream.cases import AUDITS, MORE_AUDITS, Case
from tests.upstream.runner_side import POLICIES, configured

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]


def audit_by_runner(case: Case, release: str) -> dict[str, Any]:
    """In the form of upstream's result."""
    from xlite_runner.simulation import audit

    scenario, config = configured(case)
    rank = audit(scenario, config, POLICIES[release]).ranks[case.rank]
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
    assert result["rank"] == audit_by_runner(case, release)
