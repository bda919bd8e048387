"""Start-ups that several tests look at run once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runner.lone_rank import LoneRank, LoneRanks
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.result import ProfileResult
from xlite_runner.scenario import load_scenario

Start = Callable[..., ProfileResult]


@pytest.fixture
def frozen_imports(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start-ups collect garbage at a dozen points; spare them what torch's import left.

    On a card that is so during the whole session, and garbage of other tests, which holds memory, must not be spared.
    """
    if request.config.getoption("npusim_device") == "npu":
        yield
        return
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def start_scenario() -> Start:
    """``start_scenario(path, policy, **overrides)``: the result of a start-up on the simulated device."""
    from xlite_runner.simulation import start

    results: dict[str, ProfileResult] = {}

    def start_once(path: Path, policy: str, *, profile: Any = None, **overrides: Any) -> ProfileResult:
        key = repr((path, policy, profile, sorted(overrides.items())))
        if key not in results:
            scenario = load_scenario(path, overrides)
            config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
            results[key] = start(scenario, config, ProfilePolicy(policy), profile=profile)
        return results[key]

    return start_once


@pytest.fixture
def start_rank(request: pytest.FixtureRequest, frozen_imports: None) -> Iterator[Callable[..., LoneRank]]:
    """``start_rank(path, policy, **settings)``: rank 0 of a start-up, on the device under test."""
    simulated = request.config.getoption("npusim_device") != "npu"
    if not simulated:
        request.getfixturevalue("npu_world")
    ranks = LoneRanks(simulated=simulated)
    yield ranks.start
    ranks.end()
