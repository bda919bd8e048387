"""Every operator allocates and returns what torch_npu's own was recorded to; or the ledger says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from npusim.ops.operator import schemas
from tests.ops.operator_replay import LEDGER, Kind, Record, Replayer, families, is_call, load, records

pytestmark = pytest.mark.sim_only("the recordings are of the real operators")

FAMILIES = [family for family in families() if not family.startswith("collective_")]
"""Collectives are not recorded as calls of operators; tests/hccl has them."""


@cache
def calls_of(family: str) -> list[Record]:
    calls = [record for record in records(family) if is_call(record)]
    assert calls
    return calls


def _ledger() -> dict[tuple[str, int], Kind]:
    unmatched = json.loads(LEDGER.read_text(encoding="utf-8"))["unmatched"]
    return {
        (name.partition(" ")[0], int(number)): Kind(reason)
        for reason, by_operator in unmatched.items()
        for name, numbers in by_operator.items()
        for number in numbers.split()
    }


def _sample(calls: list[Record]) -> Iterator[Record]:
    """Every call that is no systematic variation, each operator's first, and a quarter of the variations."""
    seen = set()
    for record in calls:
        is_variation = str(record.get("tag")).startswith("auto")
        keeps_state = record["op"] == "atb::_npu_rotary_embedding"
        if not is_variation or keeps_state or record["op"] not in seen or record["n"] % 4 == 0:
            seen.add(record["op"])
            yield record


def _check(family: str, calls: Iterator[Record] | list[Record], profile: str) -> None:
    expected = _ledger()
    replayer = Replayer(profile)
    surprises = []
    with replayer.world, torch.inference_mode():
        for record in calls:
            kind, detail = replayer.unmatched(record)
            if kind is not expected.get((family, record["n"])):
                surprises.append(f"{record['n']} {record['op']} {record.get('tag', '')}: {kind or 'matched'}: {detail}")
    assert not surprises, f"{len(surprises)} records against the ledger:\n" + "\n".join(surprises[:10])


def test_schemas_are_those_of_torch_npu() -> None:
    recorded = {name: schema for family in FAMILIES for name, schema in load(family)[0]["schemas"].items()}
    ours = {name: schema for name, schema in schemas().items() if name in recorded}
    differ = [name for name in ours if _parsed(ours[name]) != _parsed(recorded[name])]
    assert not differ
    assert len(ours) > 140


def _parsed(schema: str) -> str:
    return str(torch._C.parse_schema(schema))


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_do_as_recorded(family: str) -> None:
    _check(family, _sample(calls_of(family)), "a2-64g")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["a2-64g", "a3-64g"])
@pytest.mark.parametrize("family", FAMILIES)
def test_operators_do_as_recorded_in_full(family: str, profile: str) -> None:
    _check(family, calls_of(family), profile)
