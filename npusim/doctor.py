"""``python -m npusim doctor``: versions, devices, what works here and what is missing."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import npusim
from npusim.device.profile import profile_names

_CARDS = """
import torch_npu
names = [torch_npu.npu.get_device_name(index) for index in range(torch_npu.npu.device_count())]
print(f"{len(names)} card(s): {', '.join(names)}" if names else "no card is visible")
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``is_problem``: npusim cannot be used like that."""

    subject: str
    text: str
    is_problem: bool = False


def examine() -> Iterator[Finding]:
    """Look at this environment; makes a simulated world, and asks the real torch_npu in a process of its own."""
    yield Finding("npusim", npusim.__version__)
    yield Finding("python", platform.python_version(), sys.version_info < (3, 11))
    for package in ("torch", "numpy", "simpy", "pydantic", "rich", "sortedcontainers"):
        version = _version(package)
        yield Finding(package, version or "missing: pip install " + package, version is None)
    yield Finding("device profiles", ", ".join(profile_names()))
    yield _real_device()  # before the doubles can be found under its name
    yield _simulated_device()
    version = _version("pytest")
    yield Finding("pytest plugin", f"for pytest {version}" if version else "not usable: pytest is not installed")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _simulated_device() -> Finding:
    subject = "simulated device"
    try:
        from npusim import SimWorld

        with SimWorld(values="real", environment={}) as world:
            import torch
            import xlite._C

            x = torch.arange(6.0, device="npu").reshape(2, 3)
            total = int((x @ x.T).sum().item())
            reserved_bytes = torch.npu.memory_reserved()  # type: ignore[attr-defined]
            del x, xlite
            digest = world.event_log.digest
    except Exception as error:  # noqa: BLE001 - whatever goes wrong here is what the user wants to read
        return Finding(subject, f"does not work: {type(error).__name__}: {error}", is_problem=True)
    if (total, reserved_bytes) != (83, 2 << 20):
        wrong = f"computes {total} and reserves {reserved_bytes} bytes, not 83 and {2 << 20}"
        return Finding(subject, wrong, is_problem=True)
    return Finding(subject, f"works (torch.npu, xlite._C; event log {digest[:12]})")


def _real_device() -> Finding:
    subject = "real torch_npu"
    version = _version("torch-npu")
    if version is None:
        return Finding(subject, "not installed; tests run on the simulated device only")
    asked = subprocess.run([sys.executable, "-c", _CARDS], capture_output=True, text=True, check=False)
    lines = (asked.stdout if asked.returncode == 0 else asked.stderr).strip().splitlines()
    return Finding(subject, f"{version}, {lines[-1] if lines else 'no answer'}")
