"""Runs upstream in an environment that ``make_environment.sh`` made, see :mod:`tests.upstream.environment`."""

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
from tests.upstream.environment import (
    CHECKOUT_VARIABLE,
    MAKE,
    PATH,
    VARIABLE,
    Environment,
    UpstreamNotFoundError,
    run,
)

Results = dict[str, dict[str, Any]]


def pytest_configure() -> None:
    """A variable that names nothing usable is a usage error, whatever is run."""
    try:
        environment = Environment.given() if os.environ.get(VARIABLE) else None
        if environment and os.environ.get(CHECKOUT_VARIABLE):
            environment.release_for(Path(os.environ[CHECKOUT_VARIABLE]))
    except UpstreamNotFoundError as error:
        raise pytest.UsageError(str(error)) from None


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
    try:
        return Environment.given().folder
    except UpstreamNotFoundError:
        pytest.skip(f"no environment of upstream's: {MAKE} FOLDER makes one, {VARIABLE}=FOLDER names it")


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
    upstream = Environment(environment)
    done = run([upstream.python, "-W", "ignore", "-m", module, *arguments], (ROOT, PATH, upstream.release(release)))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done


@pytest.fixture(scope="session")
def upstream_results(upstream_jobs: Callable[[str, str], Results]) -> Callable[[str], Results]:
    """``upstream_results(release)``: what each start-up computed, or its error."""
    return partial(upstream_jobs, "start")


@pytest.fixture(scope="session")
def upstream_served(upstream_jobs: Callable[[str, str], Results]) -> Callable[[str], Results]:
    """``upstream_served(release)``: what each serving case took and gave, or its error."""
    return partial(upstream_jobs, "serve")
