"""What upstream's own scheduler and worker take from the device in each step of serving.

The expected peaks are counted by hand from the sources of sampler and logits processor: of ``B`` rows of a vocabulary
of ``V``, in units of ``L = B * V`` bytes.
"""

from __future__ import annotations

import pytest

from tests.upstream.cases import RELEASES, SERVING, ServingCase
from tests.upstream.runner_side import serve_by_runner

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]

MIB = 1 << 20
ROWS, VOCABULARY = 64, 151936
L = ROWS * VOCABULARY
UNITS = {"greedy": 6, "random": 15, "top-p": 19, "top-p, logprobs": 23, "greedy, penalties": 16}
"""Logits in bfloat16 (2) and float32 (4); probabilities and noise (4 each), and a mask (1) that torch_npu's
``exponential_`` makes, as recorded; the filter's output (4); raw log probabilities (4); two counts (4 each) and masks
(1 each) of penalties."""
LOGITS = 5
"""Of two ranks: the rank's part (1), the gathered parts (2), and their copy in order (2)."""
HIDDEN_ROWS_BYTES = ROWS * 2048 * 2


def cases(served: str) -> list:
    """Cases whose name begins so, on each release."""
    return [
        pytest.param(case, release, id=f"{case}-{release}")
        for release in RELEASES
        for case in SERVING
        if case.name.startswith(served) and release in case.releases
    ]


def steps_of(result: dict) -> list[dict]:
    assert "error" not in result, result["error"]
    return result["steps"]


@pytest.mark.parametrize(("case", "release"), cases(""))
def test_every_request_is_served(upstream_served, case: ServingCase, release):
    """Each gets its tokens; a step has at most the scheduler's number of tokens."""
    result = upstream_served(release)[case.name]
    assert steps_of(result)
    assert [len(output) for output in result["outputs"]] == [case.sampling["max_tokens"]] * len(case.prompts)
    scheduled = [0] * len(case.prompts)
    for step in result["steps"]:
        for request, num_tokens in step["num_scheduled_tokens"].items():
            scheduled[int(request)] += num_tokens
    assert scheduled == [len(prompt) + case.sampling["max_tokens"] - 1 for prompt in case.prompts]


@pytest.mark.parametrize(("case", "release"), cases("seed, "))
def test_peak_of_each_step(upstream_served, case, release):
    """Peaks up to the logits and of the whole step: the same for a prompt step of 6400 tokens as for decode steps."""
    sampling = case.name.removeprefix("seed, ")
    for step in steps_of(upstream_served(release)[case.name]):
        assert step["logits_peak"] == pytest.approx(LOGITS * L + HIDDEN_ROWS_BYTES, abs=0.06 * MIB)
        assert step["peak"] == pytest.approx(UNITS[sampling] * L + HIDDEN_ROWS_BYTES, abs=0.06 * MIB)


@pytest.mark.parametrize(("case", "release"), cases("seed, "))
def test_nothing_stays_of_a_step(upstream_served, case, release):
    """But for the prompt's ids that penalties keep while the batch is the same."""
    steps = steps_of(upstream_served(release)[case.name])
    kept = [step["kept"] for step in steps]
    assert kept[0] <= (64 * 100 * 8 + 512 if "penalties" in case.name else 512)
    assert kept[1:] == [0, 0]


@pytest.mark.parametrize(("case", "release"), cases("seed, "))
def test_ledger_of_serving(upstream_served, case, release):
    """Serving takes memory from the device for torch's segments only, and more than the profile run allowed for."""
    result = upstream_served(release)[case.name]
    steps_of(result)
    grown = {owner for owner, held in result["after"].items() if held != result["before"].get(owner, 0)}
    assert grown == {"torch segment: large pool"}


@pytest.mark.parametrize(("case", "release"), cases("real "))
def test_sampled_tokens_are_the_model_s(upstream_served, case, release):
    """Greedy tokens are those that transformers' code finds most probable, after prompts in one chunk or in two."""
    result = upstream_served(release)[case.name]
    steps_of(result)
    assert len({token for output in result["outputs"] for token in output}) > 3
    assert max(max(shortfall) for shortfall in result["shortfalls"]) < 0.02


@pytest.mark.parametrize(("case", "release"), cases(""))
def test_same_steps_by_the_runner(upstream_served, case, release):
    """xlite_runner's own scheduler, worker and sampler take the same memory for the same steps, to the byte."""
    if case.values == "real":
        pytest.skip("compared with another oracle: values")
    upstream = upstream_served(release)[case.name]
    steps = [
        {key: step[key] for key in ("num_scheduled_tokens", "peak", "kept", "reserved")} for step in steps_of(upstream)
    ]
    runner = serve_by_runner(case, release)
    assert runner["steps"] == steps
    assert runner["before"] == upstream["before"]
    assert runner["after"] == upstream["after"]
