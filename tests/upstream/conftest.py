"""The environment that upstream runs in: ``NPUSIM_UPSTREAM_ENV`` names the folder that ``make_environment.sh`` made."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.upstream.cases import ROOT

VARIABLE = "NPUSIM_UPSTREAM_ENV"
Results = dict[str, dict[str, Any]]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``-n 2 --dist loadgroup`` each release's jobs run in one worker, and both releases at once."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "release" in callspec.params:
            item.add_marker(pytest.mark.xdist_group(callspec.params["release"]))


@pytest.fixture(scope="session")
def upstream_environment() -> Path:
    """The folder with a Python that has upstream's requirements, and one folder per release."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set; tests/upstream/make_environment.sh FOLDER makes one")
    return Path(os.environ[VARIABLE]).resolve()


@pytest.fixture(scope="session")
def upstream_jobs(upstream_environment: Path) -> Callable[[str, str], Results]:
    """``upstream_jobs(kind, release)``: what each job of a kind gave, or its error; all run when first asked for."""
    results: dict[tuple[str, str], Results] = {}

    def run(kind: str, release: str) -> Results:
        if (kind, release) not in results:
            done = run_upstream(upstream_environment, release, "tests.upstream.jobs", kind)
            lines = map(json.loads, done.stdout.splitlines())
            results[kind, release] = {line["case"]: line for line in lines}
        return results[kind, release]

    return run


def run_upstream(
    environment: Path, release: str | Path, module: str, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run a module of these tests in upstream's environment, with a release of it or a folder with another."""
    paths = (ROOT, Path(__file__).parent / "path", environment / release)
    run = subprocess.run(
        [environment / "venv" / "bin" / "python", "-W", "ignore", "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    return run


@pytest.fixture(scope="session")
def upstream_results(upstream_jobs: Callable[[str, str], Results]) -> Callable[[str], Results]:
    """``upstream_results(release)``: what each start-up computed, or its error."""
    return partial(upstream_jobs, "start")


@pytest.fixture(scope="session")
def upstream_served(upstream_jobs: Callable[[str, str], Results]) -> Callable[[str], Results]:
    """``upstream_served(release)``: what each serving case took and gave, or its error."""
    return partial(upstream_jobs, "serve")
