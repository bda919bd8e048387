"""``pytest -p npusim.device_option`` adds ``--device``, short for ``--npusim-device``.

It is not part of the plugin, since many projects have an option of that name already.
"""

from __future__ import annotations

import pytest

from npusim.testing.choice import DEVICES


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``."""
    parser.getgroup("npusim").addoption(
        "--device", choices=DEVICES, dest="npusim_device", help="short for --npusim-device"
    )
