"""docs/support.md is what the source of both releases and the doubles say today."""

from __future__ import annotations

import pytest

from tests.upstream.cases import ROOT
from tests.upstream.support_table import table

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("about the doubles")]


def test_support_table_is_current(upstream_environment):
    """``python -m tests.upstream.support_table FOLDER`` makes it anew."""
    assert (ROOT / "docs" / "support.md").read_text(encoding="utf-8") == table(upstream_environment)
