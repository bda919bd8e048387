"""The wheel as somebody installs it: built without a compiler, into a new environment, for a project of their own.

Building it needs the network, as pip gets the build's tools. The new environment needs none: pip installs the wheel
alone, and a ``.pth`` file lends it the third-party packages of the environment that runs these tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PIP = (sys.executable, "-m", "pip")

pytestmark = [pytest.mark.slow, pytest.mark.sim_only("imports the doubles")]

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    environment = os.environ | dict.fromkeys(("CC", "CXX"), "/bin/false")
    command = [*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True, env=environment)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """Where the new environment has its programs; what it imports of ours is the wheel's."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, system_site_packages=False, with_pip=False)
    bin_folder = folder / "bin"
    subprocess.run(
        [*PIP, "--python", bin_folder / "python", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True
    )
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "third_party.pth").write_text(sysconfig.get_path("purelib"))
    return bin_folder


@pytest.fixture
def command(programs, tmp_path) -> Command:
    """``command(program, *arguments)``: run a program of the new environment, in a folder outside the project."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}

    def command(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [programs / program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return command


def test_content(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files", "npusim", "xlite_runner"], cwd=ROOT, capture_output=True, text=True)
    assert tracked.stdout.split()
    assert set(tracked.stdout.split()) <= packed
    assert {"npusim/py.typed", "xlite_runner/py.typed"} <= packed
    assert {name.split("/")[0].partition("-")[0] for name in packed} == {
        "npusim",
        "npusim_xlite_runner",
        "xlite_runner",
    }


def test_import_is_light(command, programs):
    code = """
import time; start = time.process_time()
import npusim, xlite_runner, npusim.pytest_plugin
print(time.process_time() - start, npusim.__file__, xlite_runner.__file__)
"""
    # pytest, which the plugin is for, is there already in a session
    seconds, *files = command("python", "-c", f"import pytest\n{code}").stdout.split()
    assert float(seconds) < 0.2
    assert all(Path(file).is_relative_to(programs.parent) for file in files)


def test_doctor(command):
    for program in (("python", "-m", "npusim"), ("npusim",)):
        result = command(*program, "doctor")
        assert result.returncode == 0, result.stdout + result.stderr
        assert "works (torch.npu, xlite._C; event log " in result.stdout


def test_compare(command, tmp_path):
    """The wheel has no examples: a scenario and the model's config.json are the user's own."""
    (tmp_path / "models").mkdir()
    for name in ("tiny.toml", "models/tiny-qwen3.json"):
        shutil.copy(EXAMPLES / name, tmp_path / name)
    result = command("xlite-runner", "compare", "tiny.toml", "--json")
    assert result.returncode == 0, result.stderr
    assert [entry["policy"] for entry in json.loads(result.stdout)["results"]] == ["runnable", "skip"]
    missing = command("xlite-runner", "compare", "other.toml")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == "xlite-runner: error: other.toml: cannot read the scenario: No such file or directory\n"


PROJECT = """
import pytest


def layer(size, device):
    import torch

    return torch.empty(size, dtype=torch.uint8, device=device)


def test_whose(npu_world):
    import npusim, torch_npu

    for module in (npusim, torch_npu):
        assert module.__file__.startswith(HOME)


@pytest.mark.npu_memory_limit("3 MiB")
def test_above(npu_device):
    small = layer(1 << 20, npu_device)
    large = layer(3 << 20, npu_device)


KEPT = []


@pytest.mark.npu_leaks_nothing
def test_leaks(npu_device):
    KEPT.append(layer(5 << 20, npu_device))


@pytest.mark.npu_profile("a2-32g")
@pytest.mark.seed(7)
def test_marks(npu_world):
    import torch

    assert torch.npu.get_device_name() == "Ascend910B4"
    assert torch.initial_seed() == torch.npu.initial_seed() == 7


@pytest.mark.sim_only("faults on demand")
def test_out_of_memory(npu_faults, npu_device):
    import torch

    npu_faults.fail_allocations(3)
    with pytest.raises(torch.OutOfMemoryError):
        layer(1 << 20, npu_device)


@pytest.mark.npu_only("measures real time")
def test_real_time():
    raise AssertionError
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_project_that_uses_it(workers, command, programs, tmp_path):
    """Markers and reports of an installed plugin, with whatever other plugins there are, in worker processes too."""
    home = str(programs.parent.resolve())
    (tmp_path / "test_project.py").write_text(f"HOME = {home!r}\n{PROJECT}")
    result = command("python", "-m", "pytest", "-n", workers, "-p", "no:randomly", "-rs")
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    lines = pytest.LineMatcher(result.stdout.splitlines())
    lines.fnmatch_lines(["npusim-*: device=sim profile=a3-64g seed=0 *"])
    lines.fnmatch_lines_random(
        [
            "npu_memory_limit: the test's peak on npu:0 is 4.00 MiB allocated, 3.00 MiB are allowed (1.00 MiB too *",
            "      3.00 MiB      1x  test_project.py:* layer < :* test_above",
            "      1.00 MiB      1x  test_project.py:* layer < :* test_above",
            "pytest 'test_project.py::test_above' --npusim-replay=a3-64g:0:*",
            "npu_leaks_nothing: 5.00 MiB more allocated on npu:0 after the test than before it. *",
            "      5.00 MiB      1x  test_project.py:* layer < :* test_leaks",
            "shared tests: 4  sim only: 1  npu only: 0 (and 1 skipped)",
            "skipped 1: npu_only: measures real time",
            "event logs: 5, together *",
            "*2 failed, 3 passed, 1 skipped in *",
        ]
    )


def test_project_that_has_an_option_device(command, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--device', choices=['cpu', 'cuda'], default='cpu')"
    )
    (tmp_path / "test_theirs.py").write_text(
        """
def test_option(request): assert request.config.getoption("--device") == "cuda"

def test_npu(npu_device): assert str(npu_device) == "npu:0"
"""
    )
    result = command("python", "-m", "pytest", "--device=cuda")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "shared tests: 2  sim only: 0  npu only: 0" in result.stdout


def test_option_device_of_ours(command, tmp_path):
    """In the order in which pytest loads installed plugins and those that are asked for."""
    (tmp_path / "test_ours.py").write_text("def test_npu(npu_device): pass")
    assert command("python", "-m", "pytest", "-p", "npusim.device_option", "--device=sim").returncode == 0
    card = command("python", "-m", "pytest", "-p", "npusim.device_option", "--device=npu")
    assert card.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: device npu" in card.stderr
