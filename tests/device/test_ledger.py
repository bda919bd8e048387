"""The ledger: one owner for each byte, and never more than there are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npusim.device.ledger import Grade, Ledger, LedgerFullError, Owner


def charge(ledger: Ledger, num_bytes: int, owner: Owner = Owner.RAW) -> int:
    return ledger.charge(owner, "test", num_bytes, Grade.EXACT, "a test")


def test_charge_and_release():
    ledger = Ledger(100)
    first, second = charge(ledger, 30), charge(ledger, 50, Owner.HCCL)
    assert (ledger.used_bytes, ledger.free_bytes) == (80, 20)
    assert ledger.bytes_by_owner() == {Owner.HCCL: 50, Owner.RAW: 30}
    ledger.release(first)
    assert [entry.num_bytes for entry in ledger.entries()] == [50]
    with pytest.raises(KeyError):
        ledger.release(first)
    ledger.release(second)
    assert ledger.bytes_by_owner() == {}


def test_owners_are_listed_in_their_own_order():
    ledger = Ledger(100)
    for owner in reversed(Owner):
        charge(ledger, 1, owner)
    assert list(ledger.bytes_by_owner()) == list(Owner)


def test_overfull():
    ledger = Ledger(100)
    charge(ledger, 60)
    with pytest.raises(LedgerFullError, match=r"^raw aclrtMalloc 'test' needs 41 bytes, 40 are free$"):
        charge(ledger, 41)
    assert ledger.used_bytes == 60
    charge(ledger, 40)


def test_negative():
    with pytest.raises(ValueError, match="a holding cannot be negative: raw aclrtMalloc 'test' asked for -1 bytes"):
        charge(Ledger(100), -1)


def test_ids_are_never_used_twice():
    ledger = Ledger(100)
    ids = set()
    for _ in range(5):
        entry_id = charge(ledger, 10)
        ledger.release(entry_id)
        ids.add(entry_id)
    assert len(ids) == 5


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=40))
def test_used_bytes_are_the_sum_of_the_entries(steps):
    ledger, held = Ledger(200), []
    for is_charge, number in steps:
        if is_charge:
            try:
                held.append(charge(ledger, number))
            except LedgerFullError:
                assert number > ledger.free_bytes
        elif held:
            ledger.release(held.pop(number % len(held)))
        assert ledger.used_bytes == sum(entry.num_bytes for entry in ledger.entries()) <= ledger.capacity_bytes
        assert ledger.used_bytes == sum(ledger.bytes_by_owner().values())


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["charge", "charge", "release", "reset"]), st.integers(0, 60)), max_size=40))
def test_the_peak_and_who_held_it(steps):
    """Against a ledger that is looked at after every step."""
    ledger, held = Ledger(2400), []
    best: dict[str, int] = {}
    for action, number in steps:
        if action == "charge":
            held.append(ledger.charge(Owner.RAW, f"label {number % 3}", number, Grade.EXACT, "a test"))
        elif action == "release" and held:
            ledger.release(held.pop(number % len(held)))
        now: dict[str, int] = {}
        for entry in ledger.entries():
            now[entry.label] = now.get(entry.label, 0) + entry.num_bytes
        if action == "reset":
            ledger.reset_peak()
            best = now
        elif sum(now.values()) > sum(best.values()):
            best = now
        assert ledger.peak_bytes == sum(best.values())
        assert {entry.label: entry.num_bytes for entry in ledger.peak_holdings()} == {
            label: num_bytes for label, num_bytes in best.items() if num_bytes
        }
