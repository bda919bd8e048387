"""The environment that upstream runs in: ``NPUSIM_UPSTREAM_ENV`` names the folder that ``make_environment.sh`` made."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.upstream.cases import ROOT

VARIABLE = "NPUSIM_UPSTREAM_ENV"
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def upstream_environment() -> Path:
    """The folder with a Python that has upstream's requirements, and one folder per release."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set; tests/upstream/make_environment.sh FOLDER makes one")
    return Path(os.environ[VARIABLE]).resolve()


@pytest.fixture(scope="session")
def upstream_results(upstream_environment: Path) -> Callable[[str], Results]:
    """``upstream_results(release)``: what each case computed, or its error; all start when first asked for."""
    results: dict[str, Results] = {}

    def start_all(release: str) -> Results:
        if release not in results:
            paths = (ROOT, Path(__file__).parent / "path", upstream_environment / release)
            python = upstream_environment / "venv" / "bin" / "python"
            run = subprocess.run(
                [python, "-W", "ignore", "-m", "tests.upstream.engine", "--cases"],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
                capture_output=True,
                text=True,
                check=False,
            )
            assert run.returncode == 0, run.stderr[-2000:]
            lines = map(json.loads, run.stdout.splitlines())
            results[release] = {line["case"]: line for line in lines}
        return results[release]

    return start_all
