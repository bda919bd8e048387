"""The tests' composition root: ``--device=sim`` (the configuration file's choice) or ``--device=npu``."""

from __future__ import annotations

pytest_plugins = ["npusim.pytest_plugin", "npusim.device_option", "pytester"]
