"""Runs ``tests/upstream/adapter`` inside upstream's environment: what upstream's tests of xlite leave open."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tests.upstream.cases import RELEASES, SCENARIOS
from tests.upstream.conftest import run_upstream

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_xlite_package(upstream_environment, tmp_path, monkeypatch, release, scenario):
    monkeypatch.setenv("NPUSIM_SCENARIO", scenario)
    report = tmp_path / "report.xml"
    options = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-o", "filterwarnings=", "-m", "")
    run_upstream(
        upstream_environment, release, "pytest", *options, f"--junitxml={report}", "tests/upstream/adapter/xlite.py"
    )
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert int(suite.get("tests")) > 50
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "0")
