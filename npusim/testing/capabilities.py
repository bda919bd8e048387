"""What the device under test can do, by name: the ledger behind ``@pytest.mark.needs(...)``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import pytest


class Hooks:
    """Hooks that npusim calls."""

    @pytest.hookspec
    def pytest_npusim_capabilities(self, config: pytest.Config) -> Mapping[str, str | None]:
        """Capabilities for ``needs(...)``: None if the device under test has it, else the reason why not.

        A conftest.py may add its own, or say better about one of npusim's: it has the last word.
        """
        raise NotImplementedError


def own_capabilities(device: str) -> dict[str, str | None]:
    """Entries that npusim makes itself, for device ``sim`` or ``npu``."""
    if device == "sim":
        return dict.fromkeys(("faults", "ledger", "ranks", "values", "xlite"))
    has_xlite = importlib.util.find_spec("xlite") is not None
    return {
        "faults": "nobody can make a card's allocations fail, or other processes take its memory",
        "ledger": "a card tells how much memory is free, not who holds the rest",
        "ranks": "several ranks in one process are the simulation's",
        "values": None,
        "xlite": None if has_xlite else "the package xlite is not installed",
    }


def capabilities(config: pytest.Config) -> dict[str, str | None]:
    """All that is known about the device under test."""
    merged: dict[str, str | None] = {}
    for answer in reversed(config.hook.pytest_npusim_capabilities(config=config)):
        merged.update(answer)
    return merged
