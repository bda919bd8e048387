"""Releases of upstream that nobody fitted the double to: those that are installed beside the two of the suite.

``make_environment.sh FOLDER 0.24.0:0.24.0rc1`` adds one.
"""

from __future__ import annotations

import pytest

from tests.upstream.cases import CASES, RELEASES, SERVING
from tests.upstream.environment import Environment, UpstreamNotFoundError
from tests.upstream.runner_side import figures_of_runner, serve_by_runner

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]

FAULTS = {("0.24.0", "MoE"): "IndexError: list index out of range"}
"""Faults of upstream that a card would show, too: 0.24.0rc1's xlite looks for experts where vllm 0.24 has none; mended
by vllm-ascend PR #12272."""
KIB, MIB = 1 << 10, 1 << 20
DIFFERENCES = {"0.28.0": {"weights": 49 * MIB}, "0.30.0": {"weights": 49 * MIB, "peak_activation": 64 * KIB}}
"""By how much figures differ at most from xlite_runner's; those of weights by a few small tables on any release."""
TABLES = 256 * KIB


def others() -> list[str]:
    """The installed ones."""
    try:
        return [release for release in Environment.given().releases if release not in RELEASES]
    except UpstreamNotFoundError:
        return []


def fault_of(release: str, name: str) -> str | None:
    """What upstream raises, where it does."""
    kind = "dense" if "dense" in name else "MoE"
    return FAULTS.get((release, kind))


@pytest.mark.parametrize("release", others())
@pytest.mark.parametrize("case", [case for case in CASES if case.runs_on("any other")], ids=str)
def test_start_up(upstream_results, release, case):
    """Measured memory is xlite_runner's, but for known differences, which the KV cache has less or more."""
    result = upstream_results(release)[case.name]
    if fault := fault_of(release, case.name):
        assert fault in result["error"]
        return
    assert "error" not in result, result["error"]
    runner = figures_of_runner(case, release)[case.rank]
    slack = {"weights": TABLES} | DIFFERENCES.get(release, {})
    for name in ("weights", "peak_activation", "non_torch", "graph"):
        assert result[name] == pytest.approx(runner[name], rel=0, abs=slack.get(name, 0)), name
    measured = ("weights", "peak_activation", "non_torch", "available")
    assert sum(result[name] for name in measured) == sum(runner[name] for name in measured)


@pytest.mark.parametrize("release", others())
@pytest.mark.parametrize("case", [case for case in SERVING if case.runs_on("any other")], ids=str)
def test_steps(upstream_served, release, case):
    """Steps take what xlite_runner's take."""
    result = upstream_served(release)[case.name]
    if fault := fault_of(release, case.name):
        assert fault in result["error"]
        return
    assert "error" not in result, result["error"]
    runner = serve_by_runner(case, release)[case.rank]["steps"]
    for ours, theirs in zip(runner, result["steps"], strict=True):
        assert {name: theirs[name] for name in ("num_scheduled_tokens", "peak", "kept")} == {
            name: ours[name] for name in ("num_scheduled_tokens", "peak", "kept")
        }
