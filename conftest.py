"""The tests' composition root: ``--device=sim`` (the configuration file's choice) or ``--device=npu``."""

from __future__ import annotations

import importlib.util

import pytest

from tests.stubcann.build import runs_on_the_stub

pytest_plugins = ["npusim.pytest_plugin", "npusim.device_option", "pytester"]


@pytest.hookimpl(optionalhook=True)
def pytest_npusim_capabilities(config: pytest.Config) -> dict[str, str | None]:
    """What our tests need besides what npusim knows of, and what a device lacks that is the stub CANN."""
    simulated = config.getoption("npusim_device") != "npu"
    has_custom_operators = simulated or importlib.util.find_spec("vllm_ascend") is not None
    lacks: dict[str, str | None] = {"values": "kernels of the stub CANN compute nothing"} if runs_on_the_stub() else {}
    return lacks | {"vllm_ascend": None if has_custom_operators else "the package vllm_ascend is not installed"}
