"""What an adapter does: hand a loaded model's configuration and weights to xlite, by reference."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from xlite._C import Model, ModelConfig

from xlite_runner.config import RunnerConfig
from xlite_runner.models.attention_metadata import AscendMetadata
from xlite_runner.models.decoder import CausalLM

logger = logging.getLogger(__name__)


class XliteModel(ABC):
    """One model inside xlite.

    Args:
        runnable: The loaded model; it keeps its weights.
        config: The engine's configuration.
        rank: Number of this rank among all.

    Attributes:
        supported_architectures: Names from ``config.json`` that the adapter is for.
        attn_metadata_type: Attention metadata that it can work from.
        config_values: Fields of ``xlite._C.ModelConfig``.
        native: The initialised ``xlite._C.Model``.
        freqs_cis: Rotary cosines and sines on the device, [max model length, head dim].
    """

    supported_architectures: ClassVar[tuple[str, ...]]
    attn_metadata_type: ClassVar[type[AscendMetadata]]

    def __init__(self, runnable: CausalLM, config: RunnerConfig, rank: int) -> None:
        self.runnable = runnable
        self.config = config
        self.config_values = self.build_config()
        self.native = Model()
        set_known_attributes(self.native, self.build_weights(), warn=rank == 0)
        native_config = ModelConfig()
        set_known_attributes(native_config, self.config_values, warn=rank == 0)
        self.native.init(native_config, rank)
        self.freqs_cis = self.precompute_freqs_cis()

    def tensors(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """What xlite works from, by its names."""
        weights = {name: getattr(self.native, name) for name in self.build_weights() if hasattr(self.native, name)}
        named = {"freqs_cis": self.freqs_cis, **weights}
        return {name: value if isinstance(value, Sequence) else (value,) for name, value in named.items()}

    @abstractmethod
    def build_config(self) -> Mapping[str, Any]:
        """Fields of ``xlite._C.ModelConfig``, by name."""

    @abstractmethod
    def build_weights(self) -> Mapping[str, torch.Tensor | list[torch.Tensor]]:
        """Attributes of ``xlite._C.Model``, by name."""

    @abstractmethod
    def precompute_freqs_cis(self) -> torch.Tensor:
        """The rotary table."""


def set_known_attributes(target: object, values: Mapping[str, Any], *, warn: bool) -> None:
    """Set attributes of a native object, leaving out those that this release of xlite does not have."""
    for name, value in values.items():
        if hasattr(type(target), name):
            setattr(target, name, value)
        elif warn:
            logger.warning(
                "%s has no attribute %s. Your `xlite` version might be incompatible.", type(target).__name__, name
            )
