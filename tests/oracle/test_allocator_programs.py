"""npusim's allocator against the real one of torch_npu on the stub CANN, in random programs. See docs/oracle.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.oracle.differences import TorchNpuServer, difference, script, shrunk
from tests.oracle.programs import program
from tests.oracle.target import Program
from tests.stubcann.build import StubCannError

pytestmark = pytest.mark.oracle

NUM_PROGRAMS = 200
NUM_UNCACHED_PROGRAMS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[TorchNpuServer]:
    try:
        server = TorchNpuServer()
    except StubCannError as error:
        pytest.fail(str(error), pytrace=False)
    yield server
    server.close()


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_no_difference(server: TorchNpuServer, seed: int) -> None:
    check(server, program(seed))


@pytest.mark.parametrize("seed", range(NUM_UNCACHED_PROGRAMS))
def test_no_difference_without_caching(server: TorchNpuServer, seed: int) -> None:
    check(server, replace(program(seed), caching=False))


def check(server: TorchNpuServer, written: Program) -> None:
    if difference(server, written) is None:
        return

    def differs(candidate: object) -> int | None:
        found = difference(server, candidate)
        return None if found is None else found[0]

    smallest = replace(shrunk(written, differs), full=True)
    found = difference(server, smallest)
    assert found is not None
    pytest.fail(f"{found[1]}\n\n{script(smallest)}", pytrace=False)
