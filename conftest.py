"""Which device the tests run on: ``--device=sim`` (default) or ``--device=npu``. The tests' composition root."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

DEVICES = ("sim", "npu")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``."""
    parser.addoption(
        "--device",
        choices=DEVICES,
        default="sim",
        help="sim: the simulated device (default); npu: real torch_npu on an Ascend card",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check that the chosen device is there, before torch decides what it loads."""
    config.addinivalue_line("markers", "sim_only(reason): runs on the simulated device only")
    config.addinivalue_line("markers", "npu_only(reason): runs on an Ascend card only")
    config.addinivalue_line("markers", "npu_settings(**settings): how npu_world is built on the simulated device")
    config.addinivalue_line(
        "markers", "upstream: runs the published vllm and vllm-ascend; deselected unless -m says otherwise"
    )
    config.addinivalue_line("markers", "slow: the full set of cases; deselected unless -m says so")
    if config.getoption("--device") == "npu":
        _require_npu()
    else:
        from npusim.installation import expose_doubles

        expose_doubles()


def _require_npu() -> None:
    if importlib.util.find_spec("torch_npu") is None:
        raise pytest.UsageError(
            "--device=npu needs the torch_npu package, which is not installed in this environment; install the wheel "
            "that matches your torch and CANN (pip install torch-npu), or run without --device to use the simulated "
            "device"
        )
    try:
        import torch
        import torch_npu  # noqa: F401 - registers device npu
    except (ImportError, OSError) as error:
        raise pytest.UsageError(f"--device=npu: torch_npu is installed but cannot be imported: {error}") from None
    if not torch.npu.is_available():
        raise pytest.UsageError(
            "--device=npu: torch_npu sees no card; check npu-smi info and ASCEND_RT_VISIBLE_DEVICES"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked for the other device, each with its reason."""
    other = "npu_only" if config.getoption("--device") == "sim" else "sim_only"
    for item in items:
        marker = item.get_closest_marker(other)
        if marker is not None:
            if not marker.args or not isinstance(marker.args[0], str):
                raise pytest.UsageError(f"{item.nodeid}: the marker {other} needs a reason")
            item.add_marker(pytest.mark.skip(reason=f"{other}: {marker.args[0]}"))


@pytest.fixture
def npu_world(request: pytest.FixtureRequest) -> Iterator[object]:
    """The device under test is usable inside the test: a fresh simulated world, or the card.

    On the simulated device it is the ``SimWorld``; the arguments of the marker ``npu_settings`` go to its constructor.
    On a card it is None.
    """
    if request.config.getoption("--device") == "npu":
        yield None
        return
    from npusim import SimWorld

    marker = request.node.get_closest_marker("npu_settings")
    settings = {"environment": {}} | (marker.kwargs if marker is not None else {})
    with SimWorld(**settings) as world:
        yield world


@pytest.fixture
def npu_device(npu_world: object) -> object:
    """The device under test, as torch names it."""
    del npu_world
    import torch

    return torch.device("npu", 0)
