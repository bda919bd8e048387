"""The stages of a start-up, in their order."""

from __future__ import annotations

STAGES = (
    "init_device",
    "load_model",
    "determine_available_memory",
    "initialize_from_config",
    "compile_or_warm_up_model",
)
"""Named like the worker's methods."""
