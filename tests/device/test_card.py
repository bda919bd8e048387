"""A card: what its driver takes, and sizes that contradict each other."""

from __future__ import annotations

import re

import pytest

from npusim.device.card import Card
from npusim.device.clock import Clock
from npusim.device.event_log import EventLog
from npusim.device.ledger import Grade, LedgerFullError, Owner
from npusim.device.profile import load_profile
from npusim.errors import WorldError

PROFILE = load_profile("a3-64g")
TOTAL, CONTEXT = PROFILE.total_bytes.value, PROFILE.context_bytes.value


def card(**settings) -> Card:
    return Card(0, PROFILE, Clock(), EventLog(), **settings)


def test_the_process_has_its_context_from_the_start():
    made = card()
    assert made.hbm.mem_get_info() == (TOTAL - CONTEXT, TOTAL)
    (entry,) = made.ledger.entries()
    assert (entry.owner, entry.num_bytes, entry.grade) == (Owner.CONTEXT, CONTEXT, PROFILE.context_bytes.grade)


def test_other_processes_are_part_of_the_card():
    made = card(other_processes={"neighbour": 7 << 30})
    assert made.hbm.mem_get_info()[0] == TOTAL - CONTEXT - (7 << 30)
    made.other_processes["neighbour"].resize(1 << 30)
    assert made.hbm.mem_get_info()[0] == TOTAL - CONTEXT - (1 << 30)


def test_free_bytes_decide_the_context():
    made = card(free_bytes=60 << 30, other_processes={"neighbour": 1 << 20})
    assert made.hbm.mem_get_info()[0] == 60 << 30
    assert made.ledger.bytes_by_owner()[Owner.CONTEXT] == TOTAL - (60 << 30) - (1 << 20)
    assert made.ledger.entries()[-1].grade is Grade.EXACT


def test_total_bytes_replace_the_profile():
    assert card(total_bytes=8 << 30).hbm.mem_get_info() == ((8 << 30) - CONTEXT, 8 << 30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"total_bytes": 8 << 30, "free_bytes": 9 << 30},
            f"device 0: {9 << 30} free bytes and 0 bytes of other processes exceed {8 << 30} bytes",
        ),
        (
            {"total_bytes": 8 << 30, "free_bytes": 7 << 30, "other_processes": {"a": 1 << 30, "b": 1}},
            f"device 0: {7 << 30} free bytes and {(1 << 30) + 1} bytes of other processes exceed {8 << 30} bytes",
        ),
        (
            {"total_bytes": 8 << 30, "other_processes": {"a": 8 << 30}},
            f"device 0: {CONTEXT} bytes of context and {8 << 30} bytes of other processes exceed {8 << 30} bytes",
        ),
    ],
)
def test_contradictions(settings, message):
    with pytest.raises(WorldError, match=f"^{re.escape(message)}$"):
        card(**settings)


def test_sizes_may_leave_nothing_free():
    assert card(total_bytes=8 << 30, free_bytes=0).hbm.mem_get_info()[0] == 0


def test_the_first_operator_loads_the_library():
    made = card()
    before = made.hbm.mem_get_info()[0]
    for _ in range(3):
        made.launch("aten::mm", made.default_stream, 1000)
    assert before - made.hbm.mem_get_info()[0] == PROFILE.operator_library_bytes.value
    assert made.ledger.bytes_by_owner()[Owner.KERNELS] == PROFILE.operator_library_bytes.value


def test_charges_that_do_not_fit_are_refused():
    made = card(total_bytes=8 << 30, free_bytes=0)
    with pytest.raises(LedgerFullError, match="operator kernels 'operator library' needs"):
        made.launch("aten::mm", made.default_stream, 1000)
