"""Runs programs on both allocators and says where they part, with the smallest program that shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.oracle.model import run_on_model
from tests.oracle.target import Program, Recording
from tests.stubcann.build import environment

ROOT = Path(__file__).parents[2]
MAX_TRIALS = 400
"""Runs spent on shrinking one program."""


class TorchNpuServer:
    """The process with the real torch_npu.

    Raises:
        StubCannError: The stub CANN cannot be built here.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.oracle.torch_npu_server"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def send(self, program: Program) -> None:
        """Start a program."""
        assert self._process.stdin is not None
        self._process.stdin.write(program.to_json() + "\n")
        self._process.stdin.flush()

    def receive(self) -> Recording:
        """Wait for what the program that was sent did."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process with torch_npu ended with exit status {self._process.wait()}")
        return Recording.from_json(answer)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def difference(server: TorchNpuServer, program: Program) -> tuple[int, str] | None:
    """Where the allocators part: the operation's index, and both sides; or None."""
    server.send(program)
    model = Recording.from_json(run_on_model(program).to_json())  # what JSON has no name for looks alike on both sides
    real = server.receive()
    for index, (expected, found) in enumerate(zip(real.steps, model.steps, strict=False)):
        if expected != found:
            return index, f"operation {index}, {program.operations[index]}:\n{_parting(vars(expected), vars(found))}"
    if real == model:
        return None
    if real.error or model.error:
        index = min(len(model.steps), len(program.operations) - 1)
        return index, f"the end: torch_npu {real.error!r}, npusim {model.error!r}"
    return len(program.operations) - 1, f"after all operations:\n{_parting(vars(real), vars(model))}"


def shrunk(program: Program, differs: Callable[[Program], int | None]) -> Program:
    """A program without operations that the difference does not need.

    Args:
        program: Has a difference.
        differs: Index of the operation with the difference, or None.
    """
    num_trials = 0
    found = differs(program)
    assert found is not None
    operations = program.operations[: found + 1]
    size = len(operations) // 2
    while size:
        start = 0
        while start < len(operations) and num_trials < MAX_TRIALS:
            fewer = operations[:start] + operations[start + size :]
            num_trials += 1
            index = differs(replace(program, operations=fewer)) if fewer else None
            if index is None:
                start += size
            else:
                operations = fewer[: index + 1]
        size //= 2
    return replace(program, operations=operations)


def script(program: Program) -> str:
    """A program as Python that shows the difference."""
    operations = "\n".join(f"    {operation!r}," for operation in program.operations)
    return f"""\
# python -m tests.stubcann python THIS_FILE, in the project's root
from tests.oracle.differences import TorchNpuServer, difference
from tests.oracle.target import Program

operations = [
{operations}
]
server = TorchNpuServer()
found = difference(
    server,
    Program(operations, {program.conf!r}, {program.soc!r}, {program.total_bytes}, full=True, caching={program.caching}),
)
print(found[1] if found else "no difference")
server.close()
"""


def _parting(expected: Any, found: Any, where: str = "") -> str:
    """The parts in which two values differ, one a line."""
    if expected == found:
        return ""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        return "\n".join(filter(None, (_parting(expected[key], found[key], f"{where} {key}") for key in expected)))
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return "\n".join(filter(None, (_parting(*pair, f"{where} {index}") for index, pair in pairs)))
    return f"{where.strip()}: torch_npu {expected!r}, npusim {found!r}"
