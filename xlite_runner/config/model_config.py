"""What a Hugging Face ``config.json`` says about a model, as far as the runner uses it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, Strict, ValidationError
from pydantic.dataclasses import dataclass

from xlite_runner.config.parallel_config import ParallelConfig
from xlite_runner.config.rope import DynamicNTKRopeScaling, LinearRopeScaling, RopeScaling, YarnRopeScaling, rope_fields
from xlite_runner.errors import UnsupportedModelError
from xlite_runner.validation import explain

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

VOCAB_PADDING_SIZE = 64
QWEN3_HEAD_DIM = 128
"""Of the Hugging Face class, where the file does not say."""

Dtype = Literal["bfloat16", "float16", "float32"]

DTYPE_SIZES: Mapping[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one element, by torch's name of the dtype."""

_STRICT = ConfigDict(strict=True, extra="ignore")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class MoeConfig:
    """The routed experts of a mixture-of-experts model; defaults are those of the Hugging Face class."""

    num_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    moe_intermediate_size: PositiveInt
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: Annotated[tuple[NonNegativeInt, ...], Strict(False)] = ()

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must not exceed num_experts ({self.num_experts})"
            )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelConfig:
    """The dimensions of one decoder-only model, under Hugging Face's names. Build it with :meth:`from_hf`.

    ``dtype`` is torch's name of the weights' dtype. ``attention_bias`` says whether the QKV projection has a bias,
    ``attention_output_bias`` the same of the output projection. ``moe`` is None for a dense model. ``eos_token_ids``
    end an answer.
    """

    architecture: str
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    hidden_act: Literal["silu"] = "silu"
    dtype: Dtype = "bfloat16"
    moe: MoeConfig | None = None
    eos_token_ids: tuple[NonNegativeInt, ...] = ()

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.moe is not None and not any(map(self.is_moe_layer, range(self.num_hidden_layers))):
            raise ValueError(
                f"No Qwen3MoE layer found in the model.layers. mlp_only_layers = {list(self.moe.mlp_only_layers)} and "
                f"decoder_sparse_step = {self.moe.decoder_sparse_step} must leave one of {self.num_hidden_layers}"
            )

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | Path) -> ModelConfig:
        """Read a model's dimensions.

        Args:
            source: The parsed ``config.json``, or its path.

        Raises:
            UnsupportedModelError: The file cannot be read, its architecture is not implemented, or a key is missing or
                has a value that is not supported; the text names the key, the value and what is allowed.
        """
        where, hf = ("config.json", source) if isinstance(source, Mapping) else (str(source), _read_json(source))
        try:
            return cls(**_fields_from_hf(hf))
        except ValidationError as error:
            raise UnsupportedModelError(f"{where}: {explain(error)}") from None
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{where}: {error}") from None

    @property
    def dtype_size(self) -> int:
        """Bytes of one element of the weights, activations and KV cache."""
        return DTYPE_SIZES[self.dtype]

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding on all tensor-parallel ranks together."""
        return -(-self.vocab_size // VOCAB_PADDING_SIZE) * VOCAB_PADDING_SIZE

    @property
    def derived_max_model_len(self) -> float:
        """Tokens of the longest sequence that the model is for; its scaling's factor may make it a fraction."""
        if isinstance(self.rope_scaling, YarnRopeScaling):
            return self.rope_scaling.original_max_position_embeddings * self.rope_scaling.factor
        if isinstance(self.rope_scaling, LinearRopeScaling | DynamicNTKRopeScaling):
            return self.max_position_embeddings * self.rope_scaling.factor
        return self.max_position_embeddings

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int:
        """Query heads of one tensor-parallel rank."""
        return self.num_attention_heads // parallel_config.tensor_parallel_size

    def get_num_kv_heads(self, parallel_config: ParallelConfig) -> int:
        """Key/value heads of one tensor-parallel rank; with fewer heads than ranks every rank keeps one (a replica)."""
        return max(1, self.num_key_value_heads // parallel_config.tensor_parallel_size)

    def is_moe_layer(self, layer_index: int) -> bool:
        """Whether the layer, counted from 0, has routed experts instead of a dense MLP."""
        return (
            self.moe is not None
            and layer_index not in self.moe.mlp_only_layers
            and (layer_index + 1) % self.moe.decoder_sparse_step == 0
        )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModelError(f"{path}: cannot read the model's config.json: {error.strerror}") from None
    except ValueError as error:
        raise UnsupportedModelError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _fields_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ModelConfig; what the file leaves out is derived as upstream does, or left to the defaults."""
    architecture = _architecture(hf)
    fields = {key: hf[key] for key in ModelConfig.__dataclass_fields__ if hf.get(key) is not None}
    fields["architecture"] = architecture
    fields["dtype"] = _dtype(hf)
    fields.pop("rope_scaling", None)
    fields |= rope_fields(hf)
    fields["eos_token_ids"] = _eos_token_ids(hf)
    if architecture == "LlamaForCausalLM":
        if hf.get("mlp_bias"):
            raise UnsupportedModelError("mlp_bias = True is not supported; allowed: false")
        fields["attention_output_bias"] = fields.get("attention_bias", False)
    if architecture == "Qwen2ForCausalLM":
        fields["attention_bias"] = True  # the class has QKV biases, no key says so
    if architecture == "LlamaForCausalLM" or ("num_key_value_heads" in hf and architecture != "Qwen3MoeForCausalLM"):
        fields.setdefault("num_key_value_heads", hf.get("num_attention_heads"))
    _refuse_what_others_have(hf)
    return fields | _head_dim(hf, architecture) | _experts(hf, architecture)


def _refuse_what_others_have(hf: Mapping[str, Any]) -> None:
    for key in ("use_sliding_window", "shared_expert_intermediate_size"):
        if hf.get(key):
            raise UnsupportedModelError(f"{key} = {hf[key]!r} is not supported; allowed: false, 0 or no such key")
    for key in ("quantization_config", "compression_config"):
        if hf.get(key) is not None:
            raise UnsupportedModelError(
                f"{key} = {hf[key]!r} is not supported; allowed: weights that are not quantized"
            )


def _head_dim(hf: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The ``head_dim`` that the file says, or the Hugging Face class."""
    given, derived = hf.get("head_dim"), _derived_head_dim(hf)
    if architecture == "LlamaForCausalLM" and derived is not None and hf["hidden_size"] % hf["num_attention_heads"]:
        raise UnsupportedModelError(  # the Hugging Face class says so, whatever head_dim is
            f"The hidden size ({hf['hidden_size']}) is not a multiple of the number of attention heads "
            f"({hf['num_attention_heads']})."
        )
    if given is None and architecture != "LlamaForCausalLM" and "head_dim" in hf:
        raise UnsupportedModelError("head_dim = None is not supported; allowed: an integer > 0 or no such key")
    if architecture == "Qwen2ForCausalLM" and given not in (None, derived):
        # Upstream's layers have the derived one, its buffers and xlite what the file says.
        raise UnsupportedModelError(f"head_dim = {given!r}: allowed is {derived}, as the class derives it")
    default = QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else derived
    value = default if given is None else given
    return {} if value is None else {"head_dim": value}


def _derived_head_dim(hf: Mapping[str, Any]) -> int | None:
    hidden_size, num_heads = hf.get("hidden_size"), hf.get("num_attention_heads")
    if not isinstance(hidden_size, int) or not isinstance(num_heads, int) or num_heads <= 0:
        return None
    return hidden_size // num_heads


def _experts(hf: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    if architecture != "Qwen3MoeForCausalLM":
        return {}
    return {"moe": MoeConfig(**{key: hf[key] for key in MoeConfig.__dataclass_fields__ if key in hf})}


def _architecture(hf: Mapping[str, Any]) -> str:
    architectures = hf.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise UnsupportedModelError(
            f"architectures = {architectures!r}: allowed is a list with one of {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{architectures[0]} not supported! Supported are {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    return architectures[0]


def _eos_token_ids(hf: Mapping[str, Any]) -> tuple[Any, ...]:
    eos_token_id = hf.get("eos_token_id")
    if eos_token_id is None:
        return ()
    return tuple(eos_token_id) if isinstance(eos_token_id, list) else (eos_token_id,)


def _dtype(hf: Mapping[str, Any]) -> object:
    # As upstream's dtype "auto": float32 and no dtype at all become the platform's preferred bfloat16.
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    return "bfloat16" if dtype == "float32" else dtype
