"""What upstream's own scheduler and worker take from the device in each step of serving.

The expected peaks are counted by hand from the sources of sampler and logits processor: of ``B`` rows of a vocabulary
of ``V``, in units of ``L = B * V`` bytes.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.upstream.cases import PENALTIES_WITHOUT_TRITON_BYTES, RELEASES, SERVED_BY_RANKS, SERVING, ServingCase
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
STEPS_BETWEEN_AGREEMENTS = 32
"""After so many steps upstream's replicas of a mixture of experts agree on whether any has requests left."""
HIDDEN_ROWS_BYTES = ROWS * 2048 * 2


def compared(case: ServingCase, held: dict[str, int]) -> dict[str, int]:
    """All holdings; with a drafter's module, which leaves other holes, without the caching allocator's segments."""
    has_drafter = "num_speculative_tokens" in case.settings
    return {owner: held[owner] for owner in held if not (has_drafter and owner.startswith("torch segment"))}


def cases(served: str) -> list:
    """Cases whose name begins so, on each release."""
    return [
        pytest.param(case, release, id=f"{case}-{release}")
        for release in RELEASES
        for case in (*SERVING, *SERVED_BY_RANKS)
        if case.name.startswith(served) and release in case.releases
    ]


def drafts(case: ServingCase) -> bool:
    return "num_speculative_tokens" in case.settings or "speculative_config" in case.engine_args


def steps_of(result: dict) -> list[dict]:
    assert "error" not in result, result["error"]
    return result["steps"]


def by_rank(case: ServingCase, result: dict) -> dict[int, dict]:
    """What each rank took and gave that ran upstream's code."""
    assert "error" not in result, result["error"]
    return dict(enumerate(result["ranks"])) if case.all_ranks else {case.rank: result}


@pytest.mark.parametrize(("case", "release"), cases(""))
def test_every_request_is_served(upstream_served, case: ServingCase, release):
    """Each gets its tokens, by all ranks of the replica that it was given to.

    It takes as many tokens as that needs; rejected drafts are more.
    """
    ranks = by_rank(case, upstream_served(release)[case.name])
    num_replicas = case.settings.get("data_parallel_size", 1)
    for rank, result in ranks.items():
        replica = rank * num_replicas // len(ranks) if case.all_ranks else 0
        prompts = {str(i): prompt for i, prompt in enumerate(case.prompts) if case.replica_of(i) == replica}
        assert [len(output) for output in result["outputs"]] == [case.sampling["max_tokens"]] * len(prompts)
        scheduled = Counter()
        for step in result["steps"]:
            scheduled.update(step["num_scheduled_tokens"])
        needed = Counter({i: len(prompt) + case.sampling["max_tokens"] - 1 for i, prompt in prompts.items()})
        assert needed <= scheduled if drafts(case) else needed == scheduled


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


@pytest.mark.parametrize(("case", "release"), [*cases("real "), *cases("ranks: real ")])
def test_sampled_tokens_are_the_model_s(upstream_served, case, release):
    """Greedy tokens are those that transformers' code finds most probable, after prompts in one chunk or in two.

    Also where each rank has a part of the weights and they send each other partial results.
    """
    for result in by_rank(case, upstream_served(release)[case.name]).values():
        assert len({token for output in result["outputs"] for token in output}) > 3
        assert max(max(shortfall) for shortfall in result["shortfalls"]) < 0.02


@pytest.mark.parametrize(("case", "release"), cases("real tiny MTP"))
def test_drafts_are_kept_and_rejected(upstream_served, case, release):
    """Of real values some drafts are right and some are wrong; the tokens are the model's in any case."""
    steps = steps_of(upstream_served(release)[case.name])
    num_sampled = {len(token_ids) for step in steps[2:] for token_ids in step["sampled"]}
    assert num_sampled == {1, 2}


@pytest.mark.parametrize(("case", "release"), cases(""))
def test_same_steps_by_the_runner(upstream_served, case, release):
    """xlite_runner's own scheduler, worker and sampler take the same memory for the same steps, to the byte."""
    if case.values == "real":
        pytest.skip("compared with another oracle: values")
    slack = PENALTIES_WITHOUT_TRITON_BYTES if "penalties" in case.name else 0
    by_runner = serve_by_runner(case, release)
    for rank, upstream in by_rank(case, upstream_served(release)[case.name]).items():
        runner = by_runner[rank]
        for ours, theirs in zip(runner["steps"], upstream["steps"], strict=True):
            assert ours["num_scheduled_tokens"] == theirs["num_scheduled_tokens"]
            assert ours["peak"] == pytest.approx(theirs["peak"], rel=0, abs=slack)
            assert ours["kept"] == theirs["kept"]
        assert compared(case, runner["before"]) == compared(case, upstream["before"])
        assert compared(case, runner["after"]) == compared(case, upstream["after"])


@pytest.mark.parametrize(("case", "release"), cases("ranks: tiny MoE, DP 2, one idle"))
def test_a_replica_without_requests_runs_dummy_batches_to_the_end(upstream_served, case, release):
    busy, idle = by_rank(case, upstream_served(release)[case.name]).values()
    assert len(busy["steps"]) == len(idle["steps"]) == STEPS_BETWEEN_AGREEMENTS
    assert not any(step["num_scheduled_tokens"] for step in idle["steps"])
    assert max(step["peak"] for step in idle["steps"]) > 0
