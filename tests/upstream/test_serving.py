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
PENALTIES_WITHOUT_TRITON_BYTES = 4096
"""xlite_runner applies penalties by torch's operators, which keep small temporaries that a Triton kernel does not."""


def outside_torch(held: dict[str, int]) -> dict[str, int]:
    """Holdings without those of the caching allocator, which depend on the holes that loading weights left."""
    return {owner: num_bytes for owner, num_bytes in held.items() if not owner.startswith("torch segment")}


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
    """But for the rows that logits are for, and the prompt's ids that penalties keep while the batch is the same."""
    steps = steps_of(upstream_served(release)[case.name])
    kept = [step["kept"] for step in steps]
    assert kept[0] == (64 * 100 * 8 + 512 if "penalties" in case.name else 0) + 512
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
    slack = PENALTIES_WITHOUT_TRITON_BYTES if "penalties" in case.name else 0
    runner = serve_by_runner(case, release)
    for ours, theirs in zip(runner["steps"], steps_of(upstream), strict=True):
        assert ours["num_scheduled_tokens"] == theirs["num_scheduled_tokens"]
        assert ours["peak"] == pytest.approx(theirs["peak"], rel=0, abs=slack)
        assert ours["kept"] == theirs["kept"]
    assert outside_torch(runner["before"]) == outside_torch(upstream["before"])
    assert outside_torch(runner["after"]) == outside_torch(upstream["after"])
