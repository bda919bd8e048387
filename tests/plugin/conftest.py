"""Small projects that use the plugin, on the device of the session that runs these tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

Run = Callable[..., pytest.RunResult]
ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "npusim.pytest_plugin", "-p", "no:cacheprovider")


@pytest.fixture(scope="session")
def _imported(request):
    """An inner session in this process forgets what it imports first, which torch does not survive."""
    import npusim.testing.faults
    from npusim.world import SimWorld

    with nullcontext() if request.config.getoption("--npusim-device") == "npu" else SimWorld(environment={}):
        import torch
        import torch._dynamo

        import npusim.testing.recorder
        import npusim.testing.watch  # noqa: F401

        torch.empty(4, device="npu").zero_()


@pytest.fixture
def alone(pytester, monkeypatch, _imported) -> pytest.Pytester:
    """A project with no plugins but those named; loading all that are installed takes seconds."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester


@pytest.fixture
def run(alone, request) -> Run:
    """``run(source, *arguments)``: a session in this process over one test file."""
    device = request.config.getoption("--npusim-device") or "sim"

    def run(source: str, *arguments: str, conftest: str = "") -> pytest.RunResult:
        alone.makepyfile(source)
        if conftest:
            alone.makeconftest(conftest)
        return alone.runpytest_inprocess(*PLUGIN, f"--npusim-device={device}", *arguments)

    return run


@pytest.fixture
def plugin() -> tuple[str, ...]:
    """Arguments that load the plugin."""
    return PLUGIN


@pytest.fixture
def run_apart(alone, monkeypatch) -> Run:
    """``run_apart(*arguments)``: a session in a process of its own, without torch if it does not import it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run_apart(*arguments: str, conftest: str) -> pytest.RunResult:
        alone.makeconftest(conftest)
        return alone.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=60)

    return run_apart
