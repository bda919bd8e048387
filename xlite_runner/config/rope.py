"""How a model's rotary frequencies are scaled for long sequences, as its ``config.json`` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from xlite_runner.errors import UnsupportedModelError

_STRICT = ConfigDict(strict=True, extra="ignore")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1; it changes the rotary values, no shape."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class YarnRopeScaling:
    """YaRN: the rotary table has ``factor`` times the positions that the model was trained for.

    Attributes:
        attn_factor: Of the cosines and sines, beside YaRN's own.
        beta_fast: Turns over the trained length from which frequencies are kept.
        beta_slow: Turns up to which frequencies are divided by ``factor``.
    """

    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    attn_factor: PositiveFloat = 1.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class LinearRopeScaling:
    """Positions divided by ``factor``: the rotary table has that many times ``max_position_embeddings``."""

    factor: PositiveFloat


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DynamicNTKRopeScaling:
    """A larger theta, which vLLM computes once for the longest sequence; it changes no shape."""

    factor: PositiveFloat
    max_trained_positions: PositiveInt | None = None


RopeScaling = Llama3RopeScaling | YarnRopeScaling | LinearRopeScaling | DynamicNTKRopeScaling

_KINDS: Mapping[str, type[RopeScaling]] = {
    "llama3": Llama3RopeScaling,
    "yarn": YarnRopeScaling,
    "linear": LinearRopeScaling,
    "dynamic": DynamicNTKRopeScaling,
}
_KNOWS_TRAINED_LENGTH = ("llama3", "yarn")


def rope_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments ``rope_theta`` and ``rope_scaling`` of a model's configuration, as far as the file has them.

    Raises:
        UnsupportedModelError: Embeddings of another kind.
    """
    # transformers 5 writes rope_parameters, which holds the theta too; earlier versions rope_theta and rope_scaling.
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    parameters = {"rope_theta": hf.get("rope_theta"), "partial_rotary_factor": hf.get("partial_rotary_factor"), **given}
    if parameters["partial_rotary_factor"] not in (None, 1):
        raise UnsupportedModelError(
            f"partial_rotary_factor = {parameters['partial_rotary_factor']!r} is not supported; allowed: 1"
        )
    fields = {"rope_theta": parameters["rope_theta"]} if parameters["rope_theta"] is not None else {}
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type in _KNOWS_TRAINED_LENGTH:
        trained_length = hf.get("original_max_position_embeddings")
        if trained_length is not None:
            parameters["original_max_position_embeddings"] = trained_length
        parameters.setdefault("original_max_position_embeddings", hf.get("max_position_embeddings"))
    if rope_type in _KINDS:
        fields["rope_scaling"] = _KINDS[rope_type](**parameters)
    elif rope_type != "default":
        raise UnsupportedModelError(
            f"rope_type = {rope_type!r} is not supported; allowed: default, {', '.join(_KINDS)}"
        )
    return fields
