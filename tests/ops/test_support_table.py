"""The published table of operators is the one that the code and the recordings give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npusim.ops.support import table
from tests.ops.operator_replay import LEDGER

DOCUMENT = Path(__file__).parents[2] / "docs" / "support_operators.md"


@pytest.mark.sim_only("what is simulated")
def test_the_document_is_current() -> None:
    ledger = json.loads(LEDGER.read_text(encoding="utf-8"))
    is_current = DOCUMENT.read_text(encoding="utf-8") == table(ledger)
    assert is_current, "run: python -m npusim.ops.support tests/data/operators/ledger.json > docs/support_operators.md"
