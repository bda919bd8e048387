"""vllm-ascend's own unit tests of xlite and of the worker pass on the simulated device, but for those that are listed.

``NPUSIM_UPSTREAM`` names a checkout of vllm-ascend: of a release, or one that is being worked on.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.upstream.environment import CHECKOUT_VARIABLE, Environment
from tests.upstream.unit_tests import UnitTests, expected_failures, run_unit_tests

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]


@pytest.fixture(scope="module")
def outcomes(upstream_environment, tmp_path_factory) -> UnitTests:
    """Of the checkout's tests."""
    if not os.environ.get(CHECKOUT_VARIABLE):
        pytest.skip(f"{CHECKOUT_VARIABLE} is not set; it names a checkout of vllm-ascend: wheels have no tests")
    report = tmp_path_factory.mktemp("unit_tests") / "report.xml"
    return run_unit_tests(Environment(upstream_environment), Path(os.environ[CHECKOUT_VARIABLE]).resolve(), report)


def test_all_pass_but_those_listed(outcomes):
    assert not outcomes.failed.keys() - expected_failures().keys(), outcomes.output[-6000:]
    assert len(outcomes.passed) >= 40, "the folders have hardly any tests"


def test_the_list_is_current(outcomes):
    """What is listed fails, if the checkout has it."""
    assert not expected_failures().keys() & outcomes.passed
