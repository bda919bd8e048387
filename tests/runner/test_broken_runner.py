"""With the bug of before PR #11380 put back into a copy of the runner, a shared test fails, on either device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RIGHT = "return Route.HIDDEN_STATES if self.full_mode else Route.RUNNABLE"
WRONG = "return Route.RUNNABLE"
TESTS = ("test_full_mode_sets_memory_aside_for_sampling_only", "test_before_the_fix_the_model_was_executed")


@pytest.mark.slow
@pytest.mark.needs("xlite", "vllm_ascend")
def test_a_runner_that_executes_the_model_in_its_profile_run_is_caught(request, tmp_path):
    copy = tmp_path / "xlite_runner"
    shutil.copytree(ROOT / "xlite_runner", copy, ignore=shutil.ignore_patterns("__pycache__"))
    dispatch = (copy / "dispatch.py").read_text()
    assert dispatch.count(RIGHT) == 1
    (copy / "dispatch.py").write_text(dispatch.replace(RIGHT, WRONG))

    device = request.config.getoption("npusim_device") or "sim"
    plain = (f"--device={device}", f"--override-ini=pythonpath={tmp_path}", "-p", "no:cacheprovider")
    tests = [f"tests/runner/test_either_device.py::{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", *plain, *tests]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout[-2000:]
    assert "AssertionError: the profile run executed the model" in run.stdout
    assert "1 failed, 1 passed" in run.stdout
