"""Random cases by upstream's code and by xlite_runner's: equal to the byte, or both refuse.

A handful of seeds here; ``python -m tests.upstream.fuzz`` runs any range of them.
"""

from __future__ import annotations

import pytest

from tests.upstream.cases import RELEASES
from tests.upstream.fuzz import verdict
from tests.upstream.random_cases import SEEDS, random_case
from tests.upstream.runner_side import configured

pytestmark = pytest.mark.sim_only("upstream runs on simulated worlds here")


@pytest.mark.upstream
@pytest.mark.parametrize(("seed", "release"), [(seed, RELEASES[-1]) for seed in SEEDS])
def test_random_case(upstream_jobs, tmp_path, seed, release):
    case = random_case(seed, tmp_path)
    result = verdict(case, release, upstream_jobs("random", release)[case.name])
    assert result.kind == "equal", result.details


def test_cases_follow_from_their_seeds(tmp_path):
    first, again, other = (random_case(seed, tmp_path) for seed in (1, 1, 2))
    assert first == again != other


def test_most_cases_are_valid(tmp_path):
    """The comparison would be worth little if most were refused."""
    refused = 0
    for seed in range(100):
        try:
            configured(random_case(seed, tmp_path))
        except (ValueError, RuntimeError):
            refused += 1
    assert 5 <= refused <= 40
