"""The same random serving programs through vLLM's scheduler and ours: every step equal, field by field."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.serving.our_scheduler import our_trace
from tests.upstream.cases import ROOT
from tests.upstream.scheduler_programs import digest, first_difference, random_program

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("schedulers need no device")]

NUM_PROGRAMS = 400
RELEASE = "0.23.0"
DIGESTS = ROOT / "tests" / "data" / "scheduler_traces.json"


@pytest.fixture(scope="module")
def upstream_traces(upstream_environment: Path) -> list[Any]:
    """By seed, what vLLM's scheduler did."""
    paths = (ROOT, Path(__file__).parent / "path", upstream_environment / RELEASE)
    run = subprocess.run(
        [
            upstream_environment / "venv" / "bin" / "python",
            *("-W", "ignore", "-m", "tests.upstream.scheduler", "0", str(NUM_PROGRAMS)),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_same_steps(upstream_traces):
    """Steps, results, queues, the order of free blocks, and what the prefix cache counted."""
    assert len(upstream_traces) == NUM_PROGRAMS
    for seed, theirs in enumerate(upstream_traces):
        program = random_program(seed)
        difference = first_difference(our_trace(program), theirs)
        assert difference is None, f"seed {seed}, {program}:\n{difference}"


def test_programs_meet_what_matters(upstream_traces):
    """The comparison would be worth little if nothing was ever preempted, shared, rejected or aborted."""
    met: Counter[str] = Counter()
    for trace in upstream_traces:
        steps = [entry[2] for entry in trace if entry[0] == "step"]
        outputs = [output for entry in trace if entry[0] == "outputs" for output in entry[1]]
        met["preempted"] += any(step["preempted_req_ids"] for step in steps)
        met["resumed"] += any(step["cached"]["resumed_req_ids"] for step in steps)
        met["hits"] += any(new[3] for step in steps for new in step["new"])
        met["drafts"] += any(step["spec_decode_tokens"] for step in steps)
        met["shared"] += any(step["num_common_prefix_blocks"] for step in steps)
        met["reset"] += any(entry[0] == "reset" for entry in trace)
        met |= {reason: met[reason] + 1 for reason in {output[2] for output in outputs}}
    assert all(
        met[what] >= 20 for what in ("preempted", "resumed", "hits", "drafts", "shared", "reset", "stop", "length")
    )


def test_recorded_digests_are_upstreams(upstream_traces):
    recorded = json.loads(DIGESTS.read_text(encoding="utf-8"))["digests"]
    assert recorded == [digest(trace) for trace in upstream_traces[: len(recorded)]]
