"""The wheel as somebody installs it: built without a compiler, complete, light to import. Needs the network for pip."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.sim_only("imports the doubles")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    environment = os.environ | dict.fromkeys(("CC", "CXX"), "/bin/false")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True, env=environment)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """``python(*arguments)``: what Python prints that has the wheel's packages, and of the project nothing else."""
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel],
        check=True,
    )

    def run(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(site)}
        result = subprocess.run(
            [sys.executable, *arguments], cwd=site, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


def test_content(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files", "npusim", "xlite_runner"], cwd=ROOT, capture_output=True, text=True)
    assert tracked.stdout.split()
    assert set(tracked.stdout.split()) <= packed
    assert {name.split("/")[0].partition("-")[0] for name in packed} == {
        "npusim",
        "npusim_xlite_runner",
        "xlite_runner",
    }


def test_import_is_light(python):
    code = (
        "import time; start = time.process_time(); import npusim; print(time.process_time() - start, npusim.__file__)"
    )
    seconds, file = python("-c", code).split()
    assert not Path(file).is_relative_to(ROOT)
    assert float(seconds) < 0.2


def test_doctor(python):
    assert "works (torch.npu, xlite._C; event log " in python("-m", "npusim", "doctor")
