"""The double of ``xlite._C``: its classes with their fields as class attributes, as vendor code looks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from enum import IntEnum
from typing import Any

from torch import Tensor

from npusim.errors import UnmodelledNameError
from npusim.xlite import config as _config
from npusim.xlite import native_fields as _native_fields
from npusim.xlite.native import NativeModel, Runtime
from npusim.xlite.native_fields import (
    BOOL,
    FLOAT,
    TENSOR,
    UNSIGNED,
    Closed,
    Field,
    Kind,
    enum_of,
    incompatible,
    list_of,
)

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

_ONLY_0_1, _ONLY_0_2 = ("0.1",), ("0.2",)


class AttnType(IntEnum):
    """Kinds of attention."""

    AttnMHA = 0
    AttnMLA = 1
    AttnDSA = 2


class ScoringFuncType(IntEnum):
    """Scoring functions of the MoE gate."""

    ScoringFuncSoftmax = 0
    ScoringFuncSigmoid = 1


AttnMHA, AttnMLA, AttnDSA = AttnType
ScoringFuncSoftmax, ScoringFuncSigmoid = ScoringFuncType

_ENUMS: dict[type, tuple[type[IntEnum], str]] = {
    _config.AttnType: (AttnType, "XModelAttnType"),
    _config.ScoringFuncType: (ScoringFuncType, "XModelScoringFuncType"),
}
_KINDS: dict[type, Kind] = {int: UNSIGNED, float: FLOAT, bool: BOOL, tuple: list_of(UNSIGNED)}


class ModelConfig(Closed):
    """``xlite._C.ModelConfig``: sizes and switches, all with defaults."""

    def __repr__(self) -> str:
        return f"<xlite._C.ModelConfig {self.__dict__}>"


def _add(owner: type, name: str, field: Field) -> None:
    field.__set_name__(owner, name)
    setattr(owner, name, field)


for _field in fields(_config.ModelConfig):
    _default: Any = _field.default
    assert _default is not MISSING
    if type(_default) in _ENUMS:
        _enum, _text = _ENUMS[type(_default)]
        _kind, _default = enum_of(_enum, _text), _enum(_default)
    else:
        _kind = _KINDS[type(_default)]
        _default = list(_default) if isinstance(_default, tuple) else _default
    _generations = _ONLY_0_2 if _field.name in _config.ADDED_IN_0_2 else ("0.1", "0.2")
    _add(ModelConfig, _field.name, Field(_kind, _default, generations=_generations))
_add(ModelConfig, "max_num_batched_tokens", Field(UNSIGNED, 0, storage="max_m"))


class AttnMeta(Closed):
    """``xlite._C.AttnMeta``: lengths, cached lengths and block tables on the host, positions on the device."""

    lens = Field(list_of(UNSIGNED), [])
    cached_lens = Field(list_of(UNSIGNED), [])
    block_tables_cpu = Field(list_of(list_of(UNSIGNED)), [])
    is_prefills = Field(list_of(BOOL), [], generations=_ONLY_0_1)
    positions = Field(TENSOR, None)


_TENSORS = list_of(TENSOR)
_LINEAR = ("attn_out", "mha_qkv", "mla_qkv_a", "mla_q_b", "index_q_b", "mlp_up_gate", "mlp_down")
_SUFFIXES = ("", "_input_scale", "_input_offset", "_quant_bias", "_deq_scale")
_NORMS = ("attn_norm", "mlp_norm", "mha_q_norm", "mha_k_norm", "mla_q_norm", "mla_kv_norm", "index_k_norm")
_OTHERS = ("mha_qkv_bias", "index_k_weights_proj", "gate", "gate_bias")
_EXPERTS = ("se_up_gate", "se_up_gate_deq_scale", "se_down", "se_down_deq_scale", "re_up_gate", "re_down")


class Model(Closed):
    """``xlite._C.Model``: weights by name; :meth:`init` fixes them."""

    embed = Field(TENSOR, None)
    norm = Field(TENSOR, None)
    norm_bias = Field(TENSOR, None)
    head = Field(TENSOR, None)

    mla_kv_b = Field(_TENSORS, [], generations=_ONLY_0_1)
    mla_wuv = Field(_TENSORS, [], generations=_ONLY_0_2)
    mla_wuk_t = Field(_TENSORS, [], generations=_ONLY_0_2)
    re_up_gate_deq_scale = Field(_TENSORS, [])
    re_up_gate_scale = Field(_TENSORS, [], storage="re_up_gate_deq_scale")
    re_down_deq_scale = Field(_TENSORS, [])
    re_down_scale = Field(_TENSORS, [], storage="re_down_deq_scale")

    def init(self, config: ModelConfig, rank: int = 0) -> None:
        """Check the weights against a configuration and build the device tables.

        Raises:
            TypeError: ``config`` is no :class:`ModelConfig`.
            ValueError: They do not fit; in xlite's words.
        """
        if not isinstance(config, ModelConfig):
            signature = "(self: xlite._C.Model, config: xlite._C.ModelConfig, rank: typing.SupportsInt = 0) -> None"
            raise incompatible("init", signature, f"<xlite._C.Model object>, {config!r}")
        self.__dict__["_native"] = NativeModel(config, self, rank, Runtime._driver)

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
        """Run the model on token ids; overwrites the first rows of ``output``.

        Raises:
            TypeError: ``rt`` or ``attn_meta`` is of another class.
            RuntimeError: xlite's own checks, or a pool that is too small.
        """
        self._forward("forward", rt, input, attn_meta, kv_cache, freqs_cis, output, curr_stream)

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
        """Run the model on embeddings; overwrites the first rows of ``output``.

        Raises:
            TypeError: ``rt`` or ``attn_meta`` is of another class.
            RuntimeError: xlite's own checks, or a pool that is too small.
        """
        del deepstack_input
        self._forward("forward_with_inputs_embeds", rt, input, attn_meta, kv_cache, freqs_cis, output, curr_stream)

    def _forward(
        self,
        name: str,
        rt: Runtime,
        source: Tensor,
        attn_meta: AttnMeta,
        kv_cache: Sequence[Sequence[Tensor]],
        freqs_cis: Tensor,
        output: Tensor,
        curr_stream: int,
    ) -> None:
        del curr_stream
        for argument, value, kind in (("rt", rt, Runtime), ("attn_meta", attn_meta, AttnMeta)):
            if not isinstance(value, kind):
                raise incompatible(name, f"({argument}: xlite._C.{kind.__name__}, ...) -> None", repr(value))
        self._initialised().forward(
            rt,
            source,
            attn_meta,
            kv_cache,
            output,
            weights=self,
            freqs_cis=freqs_cis,
            method=name.title().replace("_", ""),
        )

    def _initialised(self) -> NativeModel:
        native = self.__dict__.get("_native")
        if native is None:
            raise RuntimeError("xlite._C.Model.init was not called (the real library dereferences null here)")
        assert isinstance(native, NativeModel)
        return native

    def __getattr__(self, name: str) -> Any:
        raise UnmodelledNameError(f"xlite._C.Model.{name} is not modelled on the simulated device")


for _name in (
    *(f"{family}{suffix}" for family in _LINEAR for suffix in _SUFFIXES),
    *(f"{norm}{suffix}" for norm in _NORMS for suffix in ("", "_bias")),
    *_OTHERS,
    *_EXPERTS,
):
    _add(Model, _name, Field(_TENSORS, []))


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(
        f"xlite._C.{name} is not modelled on the simulated device (xlite {_native_fields.imitated_version()})"
    )
