"""The device that a test session runs on, and its making ready before torch decides what it loads."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import npusim
from npusim.errors import ProfileError
from npusim.installation import VENDOR_PATH, expose_doubles, is_double

DEVICES = ("sim", "npu")
DIGEST_LENGTH = 12
MAX_SEED = (1 << 64) - 1  # the largest that torch.manual_seed takes
_TOKEN = re.compile("(.+?):([0-9]+)(?::([0-9a-f]{1,64}))?")


@dataclass(frozen=True, slots=True)
class Choice:
    """What the session's options and configuration file say.

    Attributes:
        device: ``sim`` or ``npu``.
        explicit: Whether somebody chose the device; if nobody did, nothing happens before a test asks for one.
        profile: Kind of simulated device.
        seed: Seed of the simulated devices' and torch's generators.
        replayed_digest: What the event log's digest of a replayed test must begin with; empty: any.
    """

    device: str
    explicit: bool
    profile: str
    seed: int
    replayed_digest: str = ""

    def token(self, digest: str = "") -> str:
        """What ``--npusim-replay`` takes to do the same again: profile, seed and the event log's digest."""
        return ":".join([self.profile, str(self.seed), *([digest[:DIGEST_LENGTH]] if digest else [])])

    def header(self) -> str:
        """The line at the top of a session; torch is not imported for it."""
        device = f"device=sim profile={self.profile} seed={self.seed} replay={self.token()}"
        if self.device == "npu":
            device = f"device=npu ({_cards()}) seed={self.seed}"
        packages = ("torch", "torch_npu") if self.device == "npu" else ("torch",)
        return f"npusim-{npusim.__version__}: {device} {' '.join(f'{name}={version_of(name)}' for name in packages)}"


def read_choice(config: pytest.Config, options: argparse.Namespace) -> Choice:
    """The choice as far as it is known: options before the configuration file.

    Args:
        config: Has the configuration file.
        options: The command line as parsed so far.

    Raises:
        pytest.UsageError: A word in the configuration file, or the token, is none of those allowed.
    """
    device = _setting(config, options, "npusim_device")
    profile = _setting(config, options, "npusim_profile") or "a3-64g"
    seed = _setting(config, options, "npusim_seed") or "0"
    digest = ""
    if device not in (None, "", *DEVICES):
        raise pytest.UsageError(f"npusim_device should be one of {', '.join(DEVICES)}, got {device!r}")
    token = getattr(options, "npusim_replay", None)
    if token is not None:
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise pytest.UsageError(f"--npusim-replay should be PROFILE:SEED[:DIGEST], got {token!r}")
        if device == "npu":
            raise pytest.UsageError("--npusim-replay repeats what a simulated device did; choose device sim for it")
        profile, seed, digest = match[1], match[2], match[3] or ""
    if not (seed.isascii() and seed.isdecimal() and int(seed) <= MAX_SEED):
        raise pytest.UsageError(f"npusim_seed is a number from 0 to 2**64 - 1, got {seed!r}")
    return Choice(device or "sim", bool(device), profile, int(seed), digest)


def _setting(config: pytest.Config, options: argparse.Namespace, name: str) -> str | None:
    value = getattr(options, name, None)
    return str(config.getini(name) or "") or None if value is None else str(value)


def prepare_early(choice: Choice) -> None:
    """Before the first conftest.py is read: ``import torch_npu`` in it finds the double, if the double was chosen."""
    if choice.explicit and choice.device == "sim":
        expose_doubles()


def prepare(choice: Choice) -> None:
    """Make the chosen device usable, or say what to do.

    Raises:
        pytest.UsageError: The device is not there, both devices would share the process, or there is no such profile.
    """
    _check_profile(choice.profile)
    if choice.device == "npu":
        _require_npu()
    elif choice.explicit:
        problem = use_doubles()
        if problem:
            raise pytest.UsageError(problem)


def prepare_folder(folder: Path) -> None:
    """Make a folder that can be written to.

    Raises:
        pytest.UsageError: That is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise pytest.UsageError(f"--npusim-record: cannot write to {folder}: {error.strerror}") from None


def _check_profile(profile: str) -> None:
    from npusim.device.profile import load_profile

    try:
        load_profile(profile)
    except ProfileError as error:
        raise pytest.UsageError(f"--npusim-profile: {error}") from None


def use_doubles() -> str | None:
    """Let vendor packages be the doubles from now on; returns why that cannot be, if it cannot."""
    if "torch_npu" in sys.modules and not is_double(sys.modules["torch_npu"].__file__):
        return (
            "the simulated device cannot be used: the real torch_npu was imported into this process, by a test, by a "
            'conftest.py, or by torch itself. Choose the device before: npusim_device = "sim" in the configuration '
            "file, or --npusim-device=sim; or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
    expose_doubles()
    return None


def _require_npu() -> None:
    if VENDOR_PATH in sys.path:
        sys.path.remove(VENDOR_PATH)
    spec = importlib.util.find_spec("torch_npu")
    if spec is None:
        raise pytest.UsageError(
            "device npu needs the torch_npu package, which is not installed in this environment; install the wheel "
            "that matches your torch and CANN (pip install torch-npu), or choose device sim"
        )
    if is_double(spec.origin):
        raise pytest.UsageError(
            f"device npu was chosen, but torch_npu is npusim's double; take {VENDOR_PATH} out of PYTHONPATH, and run "
            "the tests outside python -m npusim run"
        )
    try:
        import torch_npu
    except Exception as error:  # noqa: BLE001 - torch_npu raises bare ones; torch wraps those of a backend it loads itself
        raise pytest.UsageError(
            f"device npu: torch_npu is installed but cannot be imported: {_first_line(error.__cause__ or error)}. "
            "Load CANN's environment first (source set_env.sh of the CANN toolkit), and check that torch, torch_npu "
            "and CANN belong together"
        ) from None
    try:
        num_devices = torch_npu.npu.device_count() if torch_npu.npu.is_available() else 0
        if num_devices:
            torch_npu.npu.mem_get_info(0)
    except Exception as error:  # noqa: BLE001 - likewise
        raise pytest.UsageError(
            f"device npu: the driver answers with an error: {_first_line(error)}. Check npu-smi info, and whether "
            "another process holds the card"
        ) from None
    if not num_devices:
        raise pytest.UsageError(
            "device npu: torch_npu sees no card; check npu-smi info and ASCEND_RT_VISIBLE_DEVICES, and in a container "
            "whether /dev/davinci* were passed into it"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _cards() -> str:
    import torch_npu

    return f"{torch_npu.npu.device_count()}x {torch_npu.npu.get_device_name(0)}"


def version_of(name: str) -> str:
    """Version of an installed package, without importing it; ``none`` if there is no such package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
