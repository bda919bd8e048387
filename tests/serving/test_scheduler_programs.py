"""Random serving programs give what vLLM 0.23.0's scheduler gave: all steps, results, queues and free blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serving.our_scheduler import our_trace
from tests.upstream.scheduler_programs import digest, random_program

DIGESTS = json.loads((Path(__file__).parents[1] / "data" / "scheduler_traces.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("first", range(0, len(DIGESTS["digests"]), 25))
def test_same_as_upstream(first):
    """Where one differs, ``pytest -m upstream tests/upstream/test_scheduler.py`` shows how."""
    expected = DIGESTS["digests"][first : first + 25]
    assert [digest(our_trace(random_program(seed))) for seed in range(first, first + len(expected))] == expected
