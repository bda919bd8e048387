"""Compares upstream and xlite_runner on random cases, to the byte; run with the Python of upstream's environment::

    NPUSIM_UPSTREAM_ENV=FOLDER FOLDER/venv/bin/python -m tests.upstream.fuzz 0 300

Prints what became of each seed, and at the end how many were equal. Exit code 1: something differed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.upstream.cases import PENALTIES_WITHOUT_TRITON_BYTES, RELEASES, ServingCase
from tests.upstream.conftest import run_upstream
from tests.upstream.environment import Environment, UpstreamNotFoundError
from tests.upstream.random_cases import random_case
from tests.upstream.runner_side import serve_by_runner
from xlite_runner.errors import XliteRunnerError

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
NOT_ON_THE_DOUBLE = ("UnmodelledCallError", "UnmodelledNameError", "UncomputedValueError")
BATCH = 40
"""Cases between two imports of upstream."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        kind: ``equal``; ``both refuse``; ``not supported`` by xlite_runner, which says so; ``not on the double``, where
            upstream's code needs something that is not modelled; ``different``.
        details: What differs, or the errors.
    """

    kind: str
    details: tuple[str, ...] = ()


def verdict(case: ServingCase, release: str, theirs: Mapping[str, Any]) -> Verdict:
    """Run a case by xlite_runner and compare with what upstream gave."""
    if theirs.get("type") in NOT_ON_THE_DOUBLE:
        return Verdict("not on the double", (f"upstream: {theirs['text'].splitlines()[0]}",))
    try:
        ours = serve_by_runner(case, release)[case.rank]
    except Exception as error:  # noqa: BLE001 - compared
        return _refused(error, theirs)
    if "error" in theirs:
        return Verdict("different", (f"only upstream refuses: {theirs['error']}",))
    differences = tuple(_differences(case, ours, theirs))
    return Verdict("different" if differences else "equal", differences)


def _refused(error: Exception, theirs: Mapping[str, Any]) -> Verdict:
    text = f"{type(error).__name__}: {error}"
    is_own = isinstance(error, XliteRunnerError)
    if "error" not in theirs:
        if is_own:
            return Verdict("not supported", (text,))
        return Verdict("different", (f"only xlite_runner refuses: {text}\n{traceback.format_exc()}",))
    if "text" not in theirs:  # its process ended otherwise
        return Verdict("different", (text, theirs["error"]))
    both = (f"xlite_runner: {text}", f"upstream: {theirs['type']}: {theirs['text']}")
    if is_own or _same_text(str(error), theirs["text"]):
        return Verdict("both refuse", both)
    return Verdict("different", (*both, theirs["error"]))


def _same_text(ours: str, theirs: str) -> bool:
    """Upstream's pydantic wraps some errors; a device has reserved more or less, with the holes that weights left."""
    return _without_holes(ours) in _without_holes(theirs)


def _without_holes(text: str) -> str:
    return re.sub(r"[\d.]+ [KMG]iB (free|reserved|already allocated)|\S*model\S*/\S*", "", text)


def _differences(case: ServingCase, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    for name, mine in ours["start"].items():
        if name == "kv_cache" and not ours["is_limiting"]:
            continue  # upstream's rank is alone and plans for itself
        if name == "graph" and "kv_cache_memory_bytes" in case.settings:
            continue  # upstream keeps the figure only if memory was profiled
        yield from _difference(name, mine, theirs["start"][name])
    if len(ours["steps"]) != len(theirs["steps"]):
        yield f"steps: {len(ours['steps'])} by xlite_runner, {len(theirs['steps'])} by upstream"
        return
    has_penalties = any(params.get(name) is not None for _, params in case.requests for name in PENALTIES)
    slack = {"peak": PENALTIES_WITHOUT_TRITON_BYTES if has_penalties else 0, "kept": 0}
    for number, (mine, other) in enumerate(zip(ours["steps"], theirs["steps"], strict=True)):
        scheduled = [side["num_scheduled_tokens"] for side in (mine, other)]
        if scheduled[0] != scheduled[1]:
            yield f"step {number}: {scheduled[0]} by xlite_runner, {scheduled[1]} by upstream"
            return
        for name, allowed in slack.items():
            yield from _difference(f"step {number}, {name}", mine[name], other[name], allowed)
    if ours["is_limiting"]:
        for when in ("before", "after"):
            yield from _ledger_differences(when, ours[when], theirs[when])


def _ledger_differences(when: str, ours: Mapping[str, int], theirs: Mapping[str, int]) -> Iterator[str]:
    for owner in sorted({*ours, *theirs}):
        yield from _difference(f"ledger {when} serving, {owner}", ours.get(owner, 0), theirs.get(owner, 0))


def _difference(what: str, ours: int, theirs: int, allowed: int = 0) -> Iterator[str]:
    if abs(ours - theirs) > allowed:
        yield f"{what}: {ours} by xlite_runner, {theirs} by upstream ({ours - theirs:+})"


def verdicts(environment: Path, release: str, seeds: Sequence[int]) -> Iterator[tuple[int, Verdict]]:
    """Run the cases of some seeds on both sides."""
    with tempfile.TemporaryDirectory(prefix="models") as folder:
        for first in range(0, len(seeds), BATCH):
            batch = seeds[first : first + BATCH]
            done = run_upstream(environment, release, "tests.upstream.jobs", "random", *map(str, batch))
            theirs = {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}
            for seed in batch:
                case = random_case(seed, Path(folder))
                yield seed, verdict(case, release, theirs[case.name])


def main() -> None:
    """Run a range of seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int, help="first seed")
    parser.add_argument("end", type=int, help="seed after the last one")
    parser.add_argument("--release", choices=RELEASES, default=RELEASES[-1])
    options = parser.parse_args()
    try:
        environment = Environment.given().folder
    except UpstreamNotFoundError as error:
        sys.exit(str(error))
    counts: Counter[str] = Counter()
    for seed, result in verdicts(environment, options.release, range(options.first, options.end)):
        counts[result.kind] += 1
        print(f"{seed}: {result.kind}", *result.details, sep="\n    ", flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    sys.exit(bool(counts["different"]))


if __name__ == "__main__":
    main()
