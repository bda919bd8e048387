"""The tests' composition root: ``--device=sim`` (the configuration file's choice) or ``--device=npu``."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.stubcann.build import runs_on_the_stub

# Tiny tensors gain nothing from threads, which wait for each other where several processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, and no example fails for a busy machine; --hypothesis-profile=default explores.
settings.register_profile("reproducible", derandomize=True, deadline=None, database=None)
settings.load_profile("reproducible")

pytest_plugins = ["npusim.pytest_plugin", "npusim.device_option", "pytester"]


@pytest.hookimpl(optionalhook=True)
def pytest_npusim_capabilities(config: pytest.Config) -> dict[str, str | None]:
    """What our tests need besides what npusim knows of, on each of three devices: simulated, stub CANN, card."""
    if runs_on_the_stub():
        return ON_THE_STUB
    return ON_A_CARD if config.getoption("npusim_device") == "npu" else SIMULATED


@pytest.fixture(scope="session", autouse=True)
def _imports_out_of_the_collectors_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a card every test begins with a collection, which need not look through what torch's import left."""
    if request.config.getoption("npusim_device") == "npu":
        gc.collect()
        gc.freeze()
    yield
    gc.unfreeze()


def _vllm_ascend() -> str | None:
    is_there = importlib.util.find_spec("vllm_ascend") is not None
    return None if is_there else "the package vllm_ascend is not installed"


SIMULATED: dict[str, str | None] = dict.fromkeys(("atb", "lone_rank", "no_workspaces", "vllm_ascend", "xlite_double"))
ON_THE_STUB = SIMULATED | {
    "atb": "operators of ATB are C++ classes, which the stub CANN has not",
    "values": "kernels of the stub CANN compute nothing",
}
ON_A_CARD = {
    "atb": None,
    "lone_rank": "collectives of a card wait for all ranks",
    "no_workspaces": "operators of a card have workspaces, which count in peaks",
    "vllm_ascend": _vllm_ascend(),
    "xlite_double": "the real library reads the weights",
}
