"""Where upstream's code is: an environment with its requirements and releases, and checkouts of vllm-ascend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from tests.upstream.cases import ROOT

VARIABLE = "NPUSIM_UPSTREAM_ENV"
"""Names an environment's folder; without it that of the running Python counts."""
CHECKOUT_VARIABLE = "NPUSIM_UPSTREAM"
"""Names a checkout of vllm-ascend."""
PATH = Path(__file__).parent / "path"
MAKE = "tests/upstream/make_environment.sh"
LIMIT_S = 3600
"""No run of upstream's code takes nearly that long; one that hangs ends then."""


class UpstreamNotFoundError(ValueError):
    """A folder is no environment, no checkout, or has not the release that is needed; says what to do."""


@dataclass(frozen=True)
class Environment:
    """What ``make_environment.sh`` made: a Python with upstream's requirements, and a folder for each release.

    Attributes:
        folder: The folder.
    """

    folder: Path

    @classmethod
    def given(cls) -> Environment:
        """The one that the environment variable names, or else that of the running Python.

        Raises:
            UpstreamNotFoundError: There is none.
        """
        environment = cls(Path(os.environ.get(VARIABLE) or Path(sys.prefix).parent).resolve())
        if not environment.python.is_file() or not environment.releases:
            raise UpstreamNotFoundError(
                f"{environment.folder} is no environment of upstream's: `{MAKE} FOLDER` makes one, which "
                f"{VARIABLE}=FOLDER or the use of FOLDER/venv/bin/python then names"
            )
        return environment

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def releases(self) -> tuple[str, ...]:
        """Releases of vllm, each of which is there with a vllm-ascend."""
        found = (path.parent.name for path in self.folder.glob("*/vllm_ascend") if (path.parent / "vllm").is_dir())
        return tuple(sorted(found, key=lambda release: [int(part) for part in release.split(".")]))

    def release(self, release: str | Path) -> Path:
        """The folder of a release, or any folder with another one.

        Raises:
            UpstreamNotFoundError: It is not installed.
        """
        folder = self.folder / release
        if not (folder / "vllm_ascend").is_dir():
            raise UpstreamNotFoundError(f"vllm {release} is not installed: {self._install(str(release))}")
        return folder

    def release_for(self, checkout: Path) -> str:
        """The installed release of vllm that a checkout of vllm-ascend is tested with.

        Raises:
            UpstreamNotFoundError: It is no checkout of vllm-ascend, says no release, or one that is not installed.
        """
        check_checkout(checkout)
        tag = checkout / ".github" / "vllm-release-tag.commit"
        installed = ", ".join(self.releases)
        if not tag.is_file():
            raise UpstreamNotFoundError(
                f"{checkout} does not say which vllm it is for: {tag.relative_to(checkout)} is missing, which came "
                f"with v0.21.0rc1; installed are {installed}"
            )
        release = tag.read_text(encoding="utf-8").strip().removeprefix("v")
        if release not in self.releases:
            raise UpstreamNotFoundError(
                f"{checkout} is tested with vllm {release}: installed are {installed}; {self._install(release)}"
            )
        return release

    def _install(self, release: str) -> str:
        return f"`{MAKE} {self.folder} {release}:RELEASE_OF_VLLM_ASCEND` installs it"


def check_checkout(checkout: Path) -> None:
    """See that a folder is a checkout of vllm-ascend.

    Raises:
        UpstreamNotFoundError: It is not; the text says what is missing.
    """
    for needed in ("vllm_ascend", "vllm_ascend/xlite"):
        if not (checkout / needed / "__init__.py").is_file():
            raise UpstreamNotFoundError(f"{checkout} is no checkout of vllm-ascend with xlite: {needed} is missing")


@contextmanager
def package_alone(checkout: Path | None) -> Iterator[tuple[Path, ...]]:
    """What to put on the path so that a checkout's package is found, but not its folder ``tests``; nothing for None."""
    if checkout is None:
        yield ()
        return
    with TemporaryDirectory(prefix="checkout") as folder:
        (Path(folder) / "vllm_ascend").symlink_to(checkout.resolve() / "vllm_ascend")
        yield (Path(folder),)


def run(
    command: Sequence[str | Path],
    paths: Sequence[Path],
    *,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    stderr: int | IO[str] | None = subprocess.PIPE,
    limit_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or to a limit, whatever processes it has started.

    Args:
        command: The command.
        paths: Its ``PYTHONPATH``.
        cwd: Its folder.
        environment: Variables besides those of this process.
        stderr: Where its messages go.
        limit_s: Seconds after which it is ended.

    Returns:
        Its exit code and what it printed.

    Raises:
        TimeoutError: It did not end by itself; the text has the end of what it printed.
    """
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        output, messages = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # children of its own hold the pipes open
        output, messages = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            text = f"{command[-1]} did not end in {limit_s:g} s:\n{output[-2000:]}{(messages or '')[-2000:]}"
            raise TimeoutError(text) from None
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, messages or "")
