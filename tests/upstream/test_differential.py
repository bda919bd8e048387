"""The same start-ups by upstream's code and by xlite_runner's, on the same world: equal to the byte."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.upstream.cases import CASES, REFUSED, RELEASES, Case
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.scenario import load_scenario
from xlite_runner.simulation import start

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]

POLICIES = {"0.22.1": ProfilePolicy.RUNNABLE, "0.23.0": ProfilePolicy.SKIP}


def figures_of_upstream(result: dict[str, Any]) -> dict[str, int]:
    assert "error" not in result, result["error"]
    names = ("weights", "peak_activation", "non_torch", "available", "kv_cache", "graph")
    return {name: result[name] for name in names}


def figures_of_runner(case: Case, release: str) -> dict[str, int]:
    scenario = load_scenario(case.scenario, case.settings)
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    rank = start(scenario, config, POLICIES[release]).ranks[case.rank]
    return {
        "weights": rank.weights_bytes,
        "peak_activation": rank.peak_activation_bytes,
        "non_torch": rank.non_torch_bytes,
        "available": rank.available_kv_cache_bytes,
        "kv_cache": rank.kv_cache_bytes,
        "graph": rank.graph_bytes,
    }


@pytest.mark.parametrize(
    ("case", "release"),
    [(case, release) for release in RELEASES for case in CASES if release in case.releases],
    ids=str,
)
def test_same_bytes(upstream_results, case, release):
    """Weights, peak activation, non-torch, available, KV-cache and graph memory."""
    assert figures_of_runner(case, release) == figures_of_upstream(upstream_results(release)[case.name])


@pytest.mark.parametrize(
    ("text", "case", "release"),
    [(text, case, release) for release in RELEASES for text, case in REFUSED.items()],
    ids=lambda value: str(value)[:30],
)
def test_same_refusal(upstream_results, text, case, release):
    """Both end with the same error."""
    assert text in upstream_results(release)[case.name]["error"]
    with pytest.raises(ValueError, match=re.escape(text)):
        figures_of_runner(case, release)
