"""The same start-ups by upstream's code and by xlite_runner's, on the same world: equal to the byte."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.upstream.cases import CASES, NO_DRAFTS, REFUSED, RELEASES
from tests.upstream.runner_side import figures_of_runner

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]


def figures_of_upstream(result: dict[str, Any]) -> dict[str, int]:
    assert "error" not in result, result["error"]
    names = ("weights", "peak_activation", "non_torch", "available", "kv_cache", "graph")
    return {name: result[name] for name in names}


@pytest.mark.parametrize(
    ("case", "release"),
    [(case, release) for release in RELEASES for case in CASES if release in case.releases],
    ids=str,
)
def test_same_bytes(upstream_results, case, release):
    """Weights, peak activation, non-torch, available, KV-cache and graph memory."""
    assert figures_of_runner(case, release)[case.rank] == figures_of_upstream(upstream_results(release)[case.name])


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


@pytest.mark.parametrize("release", NO_DRAFTS.releases)
def test_the_earlier_release_has_no_drafts_with_xlite(upstream_results, release):
    """xlite_runner follows the later one, also where its profile run is the earlier one's."""
    error = upstream_results(release)[NO_DRAFTS.name]["error"]
    assert "Xlite graph mode is not compatible with speculative decoding." in error
