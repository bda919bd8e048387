"""Adapters that hand a loaded model to xlite, by architecture."""

from __future__ import annotations

from collections.abc import Mapping

from xlite_runner.adapters.base import XliteModel
from xlite_runner.adapters.llama import LlamaXliteModel
from xlite_runner.adapters.qwen_moe import QwenMoeXliteModel

ADAPTERS: Mapping[str, type[XliteModel]] = {
    architecture: adapter
    for adapter in (LlamaXliteModel, QwenMoeXliteModel)
    for architecture in adapter.supported_architectures
}
"""Adapter of each architecture."""


def get_adapter(architecture: str) -> type[XliteModel]:
    """The adapter of an architecture.

    Raises:
        ValueError: xlite does not support it; upstream's text.
    """
    if architecture not in ADAPTERS:
        raise ValueError(f"{architecture} not supported!")
    return ADAPTERS[architecture]


__all__ = ["ADAPTERS", "LlamaXliteModel", "QwenMoeXliteModel", "XliteModel", "get_adapter"]
