"""An engine that upstream started in this process; one scenario per process, since upstream keeps it in globals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.upstream.cases import SCENARIOS
from tests.upstream.engine import StartedRank, import_upstream, started
from xlite_runner.scenario import load_scenario


@pytest.fixture(scope="session")
def upstream() -> Iterator[StartedRank]:
    """Upstream, started on the scenario that ``NPUSIM_SCENARIO`` names; with weights and values."""
    case = SCENARIOS[os.environ["NPUSIM_SCENARIO"]]
    scenario = load_scenario(case.scenario, case.settings)
    import_upstream(scenario.device_profile)
    with started(scenario, values="real") as rank:
        yield rank


@pytest.fixture
def wrapper(upstream) -> Any:
    """Its ``XliteWrapper``."""
    return upstream.worker.model_runner.model


@pytest.fixture
def forward_context(monkeypatch) -> SimpleNamespace:
    """What the wrapper finds as its forward's context; tests fill it."""
    context = SimpleNamespace(in_profile_run=False, attn_metadata=None, batch_descriptor=None)
    monkeypatch.setattr("vllm_ascend.xlite.xlite.get_forward_context", lambda: context)
    return context
