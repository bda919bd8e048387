"""vllm-ascend's own unit tests of xlite and of the worker pass on the simulated device, but for those that are listed.

``NPUSIM_UPSTREAM`` names a checkout of vllm-ascend: of a release, or one that is being worked on.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from tests.upstream.unit_tests import UnitTests, release_of, run_unit_tests

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]

VARIABLE = "NPUSIM_UPSTREAM"
LEDGER = Path(__file__).with_name("unit_tests.toml")


@pytest.fixture(scope="module")
def outcomes(upstream_environment, tmp_path_factory) -> UnitTests:
    """Of the checkout's tests."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set; it names a checkout of vllm-ascend, whose tests the wheels do not have")
    report = tmp_path_factory.mktemp("unit_tests") / "report.xml"
    return run_unit_tests(upstream_environment, Path(os.environ[VARIABLE]).resolve(), report)


@pytest.fixture(scope="module")
def expected_failures() -> dict[str, str]:
    """Names of tests, each with the reason why it fails on the simulated device."""
    return tomllib.loads(LEDGER.read_text(encoding="utf-8"))["fails"]


def test_all_pass_but_those_listed(outcomes, expected_failures):
    unexpected = {name: message for name, message in outcomes.failed.items() if name not in expected_failures}
    assert not unexpected, outcomes.output[-6000:]
    assert len(outcomes.passed) >= 40, "the folders have hardly any tests"


def test_the_list_is_current(outcomes, expected_failures):
    """What is listed fails, if the checkout has it."""
    assert not expected_failures.keys() & outcomes.passed


def test_nothing_but_a_checkout_is_taken(tmp_path):
    with pytest.raises(ValueError, match="no checkout of vllm-ascend"):
        release_of(tmp_path)
    (tmp_path / ".github").mkdir()
    (tmp_path / ".github" / "vllm-release-tag.commit").write_text("v0.9.1\n")
    with pytest.raises(ValueError, match=r"is tested with vllm 0\.9\.1: installed are 0\.22\.1, 0\.23\.0"):
        release_of(tmp_path)
