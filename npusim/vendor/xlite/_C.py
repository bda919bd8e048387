"""The double of ``xlite._C``: its classes with their fields as class attributes, as vendor code looks for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from enum import IntEnum
from typing import Any

from torch import Tensor

from npusim.errors import UnmodelledNameError
from npusim.xlite import config as _config
from npusim.xlite.config import AttnType, ScoringFuncType
from npusim.xlite.native import NativeModel, Runtime

AttnMHA, AttnMLA, AttnDSA = AttnType.AttnMHA, AttnType.AttnMLA, AttnType.AttnDSA
ScoringFuncSoftmax, ScoringFuncSigmoid = ScoringFuncType.ScoringFuncSoftmax, ScoringFuncType.ScoringFuncSigmoid

__all__ = [
    "AttnDSA",
    "AttnMHA",
    "AttnMLA",
    "AttnMeta",
    "AttnType",
    "Model",
    "ModelConfig",
    "Runtime",
    "ScoringFuncSigmoid",
    "ScoringFuncSoftmax",
    "ScoringFuncType",
]


class _Field:
    """A field of a native object: typed, with a default, visible on the class."""

    def __init__(self, name: str, default: Any) -> None:
        self._name = name
        self._default = default

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance.__dict__.get(self._name, self._default)

    def __set__(self, instance: Any, value: Any) -> None:
        kind = type(self._default)
        if kind is tuple:
            value = list(value)
        elif kind is float and isinstance(value, int):
            value = float(value)
        elif not isinstance(value, (kind, int)) or (isinstance(self._default, int) and value < 0):
            raise TypeError(f"incompatible value for {self._name}: {value!r} is not a {kind.__name__} of at least 0")
        instance.__dict__[self._name] = value


class _Closed:
    """Refuses unknown attributes, as the native class does; a Python subclass accepts them."""

    _closed: type

    def __setattr__(self, name: str, value: Any) -> None:
        if type(self) is self._closed and not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        super().__setattr__(name, value)


class ModelConfig(_Closed):
    """``xlite._C.ModelConfig``: sizes and switches, all with defaults."""

    max_num_batched_tokens: int

    def __repr__(self) -> str:
        return f"<xlite._C.ModelConfig {self.__dict__}>"


for _field in fields(_config.ModelConfig):
    assert _field.default is not MISSING
    _is_enum = isinstance(_field.default, IntEnum)
    setattr(ModelConfig, _field.name, _Field(_field.name, int(_field.default) if _is_enum else _field.default))
ModelConfig.max_num_batched_tokens = ModelConfig.max_m  # type: ignore[attr-defined]
ModelConfig._closed = ModelConfig


class _Weight:
    """One weight tensor; None until it is set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance.__dict__.get(self._name)

    def __set__(self, instance: Any, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"incompatible value for {self._name}: a tensor is needed, got {value!r}")
        instance.__dict__[self._name] = value


class _Weights(_Weight):
    """One tensor per layer (or per layer and expert); empty until set."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance.__dict__.setdefault(self._name, [])

    def __set__(self, instance: Any, value: Iterable[Tensor]) -> None:
        tensors = list(value) if isinstance(value, Iterable) else [value]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise TypeError(f"incompatible value for {self._name}: a list of tensors is needed")
        instance.__dict__[self._name] = tensors


class AttnMeta(_Closed):
    """``xlite._C.AttnMeta``: lengths, cached lengths and block tables on the host, positions on the device."""

    lens: Sequence[int] = ()
    cached_lens: Sequence[int] = ()
    block_tables_cpu: Sequence[Sequence[int]] = ()
    is_prefills: Sequence[bool] = ()
    positions: Tensor | None = None


AttnMeta._closed = AttnMeta

_LINEAR = ("attn_out", "mha_qkv", "mla_qkv_a", "mla_q_b", "index_q_b", "mlp_up_gate", "mlp_down")
_SUFFIXES = ("", "_input_scale", "_input_offset", "_quant_bias", "_deq_scale")
_NORMS = ("attn_norm", "mlp_norm", "mha_q_norm", "mha_k_norm", "mla_q_norm", "mla_kv_norm", "index_k_norm")
_OTHERS = ("mha_qkv_bias", "mla_kv_b", "mla_wuv", "mla_wuk_t", "index_k_weights_proj", "gate", "gate_bias")
_EXPERTS = ("se_up_gate", "se_up_gate_deq_scale", "se_down", "se_down_deq_scale")
_ROUTED = ("re_up_gate", "re_up_gate_scale", "re_up_gate_deq_scale", "re_down", "re_down_scale", "re_down_deq_scale")


class Model(_Closed):
    """``xlite._C.Model``: weights by name; :meth:`init` fixes them."""

    embed = _Weight()
    norm = _Weight()
    norm_bias = _Weight()
    head = _Weight()

    def init(self, config: Any, rank: int = 0) -> None:
        """Check the weights against a configuration and build the device tables.

        Raises:
            RuntimeError: They do not fit.
        """
        self.__dict__["_native"] = NativeModel(config, self, rank)

    def get_tensor_pool_size(self, dbg: int = 0) -> int:
        """Megabytes (2^20) of tensor pool that a forward needs at most."""
        del dbg
        return self._initialised().tensor_pool_megabytes()

    def forward(
        self,
        rt: Runtime,
        input: Tensor,  # noqa: A002 - xlite's name
        attn_meta: AttnMeta,
        kv_cache: Sequence[Sequence[Tensor]],
        freqs_cis: Tensor,
        output: Tensor,
        curr_stream: int = 0,
    ) -> None:
        """Run the model on token ids; overwrites the first rows of ``output``."""
        del freqs_cis, curr_stream
        self._initialised().forward(rt, input, attn_meta, kv_cache, output)

    def forward_with_inputs_embeds(
        self,
        rt: Runtime,
        input: Tensor,  # noqa: A002 - xlite's name
        attn_meta: AttnMeta,
        kv_cache: Sequence[Sequence[Tensor]],
        freqs_cis: Tensor,
        output: Tensor,
        curr_stream: int = 0,
        deepstack_input: Sequence[Tensor] = (),
    ) -> None:
        """Run the model on embeddings; overwrites the first rows of ``output``."""
        del freqs_cis, curr_stream, deepstack_input
        self._initialised().forward(rt, input, attn_meta, kv_cache, output)

    def _initialised(self) -> NativeModel:
        native = self.__dict__.get("_native")
        if native is None:
            raise RuntimeError("xlite._C.Model.init was not called (the real library dereferences null here)")
        assert isinstance(native, NativeModel)
        return native


for _name in (
    *(f"{family}{suffix}" for family in _LINEAR for suffix in _SUFFIXES),
    *(f"{norm}{suffix}" for norm in _NORMS for suffix in ("", "_bias")),
    *_OTHERS,
    *_EXPERTS,
    *_ROUTED,
):
    _weights = _Weights()
    _weights.__set_name__(Model, _name)
    setattr(Model, _name, _weights)
Model._closed = Model


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"xlite._C.{name} is not modelled on the simulated device")
