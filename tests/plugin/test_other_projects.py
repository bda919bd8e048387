"""Somebody else's project, in which npusim is installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(pytester, monkeypatch) -> pytest.Pytester:
    """npusim as pip leaves it: importable, with its entry point among those of the installed packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    site = pytester.mkdir("site")
    info = site / "npusim_xlite_runner-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entry_points = [f"{name} = {module}" for name, module in project["entry-points"]["pytest11"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *entry_points]))
    for package in ("npusim", "xlite_runner"):
        (site / package).symlink_to(ROOT / package)
    monkeypatch.setenv("PYTHONPATH", str(site))
    return pytester


def test_project_with_a_device_option_of_its_own(installed):
    """It has never heard of npusim: same option, same names of markers, and nothing is imported behind its back."""
    installed.makeconftest(
        """
        import pytest

        def pytest_addoption(parser):
            parser.addoption("--device", choices=["cpu", "cuda"], default="cpu")

        def pytest_configure(config):
            config.addinivalue_line("markers", "needs(hardware): the project's own")
            config.addinivalue_line("markers", "seed(text): the project's own")
        """
    )
    installed.makepyfile(
        """
        import sys
        import pytest

        def test_option(request):
            assert request.config.getoption("--device") == "cuda"

        @pytest.mark.needs("fpga")
        @pytest.mark.seed("today")
        def test_nothing_behind_its_back():
            assert not {"torch", "simpy", "npusim.world"} & set(sys.modules)
            assert not [path for path in sys.path if path.endswith("vendor")]
        """
    )
    result = installed.runpytest_subprocess("--strict-markers", "-p", "no:randomly", "--device=cuda")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["npusim-*: device=sim *"])
    result.stdout.no_fnmatch_line("=* npusim*")


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_project_that_asks_for_a_device(workers, installed):
    """Its conftest.py imports torch_npu, as on a card; markers work in worker processes too."""
    installed.makepyprojecttoml("[tool.pytest.ini_options]\nnpusim_device = 'sim'\n")
    installed.makeconftest("import torch_npu")
    installed.makepyfile(
        """
        import pytest, torch, torch_npu

        @pytest.mark.npu_memory_limit("10 MiB")
        def test_memory():
            torch.empty(12 << 20, dtype=torch.int8, device="npu")

        @pytest.mark.npu_only("real time")
        def test_time(): pass
        """
    )
    result = installed.runpytest_subprocess(workers, "-p", "no:randomly")
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "npusim-*: device=sim profile=a3-64g *",
            "npu_memory_limit: the test's peak on npu:0 is 12.00 MiB allocated, 10.00 MiB are allowed *",
            "     12.00 MiB      1x  test_project_that_asks_for_a_device.py:5 test_memory",
            "shared tests: 1  sim only: 0  npu only: 0 (and 1 skipped)",
            "skipped 1: npu_only: real time",
            "  *12.00 MiB * MiB  test_project_that_asks_for_a_device.py::test_memory",
            "event logs: 1, together *",
        ]
    )
