"""Start-ups in which every rank runs upstream's code, in a process of its own; and what becomes of ranks that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.upstream.cases import RANKS, RELEASES, ROOT
from tests.upstream.runner_side import figures_of_runner
from tests.upstream.test_differential import figures_of_upstream

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]


@pytest.mark.parametrize(
    ("case", "release"),
    [(case, release) for release in RELEASES for case in RANKS if release in case.releases],
    ids=str,
)
def test_same_bytes_on_every_rank(upstream_results, case, release):
    """The ranks' devices differ, and so does what their replicas have for the KV cache."""
    result = upstream_results(release)[case.name]
    assert "error" not in result, result["error"]
    upstream = [figures_of_upstream(rank) for rank in result["ranks"]]
    assert figures_of_runner(case, release) == upstream
    available = [rank["available"] for rank in upstream]
    assert len(set(available)) == len(available)
    size = len(upstream) // case.settings.get("data_parallel_size", 1)
    caches = [{rank["kv_cache"] for rank in upstream[first : first + size]} for first in range(0, len(upstream), size)]
    assert all(len(of_replica) == 1 for of_replica in caches)  # of its rank with the least
    assert len(set.union(*caches)) == len(caches)  # replicas do not tell each other


PROGRAM = """
import json, os, signal, sys, time
from tests.upstream.ranks import RankFailedError, in_processes

def work(rank, peers):
    with open(f"{sys.argv[2]}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    HOW[sys.argv[1]](rank, peers.store("all"))
    return rank

def raises(rank, store):
    if rank == 1:
        raise ValueError("no memory left")
    store.get("never")

def dies(rank, store):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    store.get("never")

def never_meets(rank, store):
    if rank == 0:
        store.get("never")

def sleeps(rank, store):
    if rank == 1:
        time.sleep(1000)

HOW = {"raises": raises, "dies": dies, "never meets": never_meets, "sleeps": sleeps, "works": lambda rank, store: None}
try:
    print(json.dumps({"results": in_processes(2, work, wait_s=2, timeout_s=5)}))
except RankFailedError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("works", {"results": [0, 1]}),
        ("raises", "rank 1 of 2 failed:"),
        ("dies", "rank 1 of 2 ended without a result, with SIGSEGV"),
        ("never meets", "rank 0 of 2 failed:"),
        ("sleeps", "after 5 s these ranks have not ended: 1"),
    ],
)
def test_ranks_that_fail(how, expected, tmp_path):
    """The error says which and why, in finite time, and no process is left."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, how, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    answer = json.loads(run.stdout)
    assert answer == expected if how == "works" else answer["error"].startswith(expected)
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
