"""``python -m npusim doctor``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import npusim
from npusim import doctor
from npusim.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.mark.sim_only("makes a world in this process")
def test_everything_there(capsys, run):
    assert main(["doctor"]) == 0
    lines = {line[2:].split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["npusim"].endswith(npusim.__version__)
    assert re.search(r"  works \(torch\.npu, xlite\._C; event log [0-9a-f]{12}\)$", lines["simulated device"])
    assert not [line for line in lines.values() if not line.startswith("  ")]


def test_missing_package(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda package: None if package in ("simpy", "torch-npu") else "1.0")
    monkeypatch.setattr(doctor, "_simulated_device", lambda: doctor.Finding("simulated device", "does not work", True))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^! simpy +missing: pip install simpy$", shown, re.MULTILINE)
    assert re.search(r"^! simulated device +does not work$", shown, re.MULTILINE)
    assert re.search(r"^  real torch_npu +not installed; tests run on the simulated device only$", shown, re.MULTILINE)


def test_imports_are_light():
    """What a session pays that has the plugin and does not use it: neither torch nor anything else that is heavy."""
    code = "import sys, npusim.pytest_plugin, npusim.__main__; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not {"torch", "numpy", "simpy", "pydantic", "rich", "npusim.world"} & set(shown.split())
