"""xlite's native objects on a simulated device: what ``xlite._C`` holds behind its names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from npusim.device.card import Card
from npusim.device.ledger import Grade, Owner
from npusim.device.profile import Fact
from npusim.errors import UnmodelledCallError
from npusim.hccl.communicator import Communicator
from npusim.torch_backend.registration import platform
from npusim.torch_backend.runtime import DeviceRuntime
from npusim.torch_backend.values import RealValues
from npusim.xlite.arena import Arena
from npusim.xlite.config import DeviceFacts, Environment, ModelConfig, QuantKind, WeightFacts
from npusim.xlite.forward import forward
from npusim.xlite.forward_pass import ForwardPass, Step
from npusim.xlite.outside_pool import When, outside_pool
from npusim.xlite.pool import tensor_pool_size
from npusim.xlite.rank_model import RankModel
from npusim.xlite.tensors import DType, Tensor, TensorPool

_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16, torch.float32: DType.FP32, torch.int8: DType.INT8}
_POOL_SOURCE = "xlite csrc/runtime.cpp: one aclrtMalloc of size << 20"


def _device_facts(card: Card) -> DeviceFacts:
    profile = card.profile
    return DeviceFacts(num_ai_cores=profile.num_aicore.value, devices_per_node=profile.devices_per_node.value)


def _charge(card: Card, model: RankModel, when: When) -> None:
    for allocation in outside_pool(model):
        if allocation.when is when:
            fact = Fact(allocation.num_bytes, allocation.grade, allocation.source)
            card.charge(Owner.XLITE_TABLES, allocation.label, fact)


class Runtime:
    """``xlite._C.Runtime``: touches no device until :meth:`init_tensor_pool`.

    Args:
        devid: Index of the device.
        size: Megabytes of the tensor pool; 0 leaves it to :meth:`init_tensor_pool`.
        rank: Rank in the world.
        tp_size: Ranks of the tensor-parallel group.
        dp_size: Ranks of the data-parallel group.
        moe_tp_size: Ranks that share an expert.
        moe_ep_size: Ranks that experts are spread over.
    """

    def __init__(
        self,
        devid: int,
        size: int = 0,
        rank: int = 0,
        tp_size: int = 1,
        dp_size: int = 1,
        moe_tp_size: int = 1,
        moe_ep_size: int = 1,
    ) -> None:
        numbers = {"devid": devid, "size": size, "rank": rank, "tp_size": tp_size, "dp_size": dp_size}
        for name, number in numbers.items():
            if not isinstance(number, int) or number < 0:
                raise TypeError(f"incompatible constructor arguments: {name} must be an unsigned int, got {number!r}")
        self.devid, self.rank = devid, rank
        self.tp_size, self.dp_size = tp_size, dp_size
        self.moe_tp_size, self.moe_ep_size = moe_tp_size, moe_ep_size
        self.pool: TensorPool | None = None
        self.communicators: dict[str, Communicator] = {}
        self._has_run_forward = False
        self.init_tensor_pool(size)

    @property
    def device(self) -> DeviceRuntime:
        """The simulated device behind :attr:`devid`."""
        return platform().runtimes[self.devid]

    def init_tensor_pool(self, size_mb: int) -> int:
        """Take the pool, open communicators; a later call, and one with 0, does nothing. Returns 0.

        Raises:
            OutOfHbmError: The device has no room for the pool.
        """
        if size_mb == 0 or self.pool is not None:
            return 0
        device = self.device
        device.card.hbm.malloc(
            size_mb << 20, owner=Owner.XLITE_POOL, label="tensor pool", grade=Grade.EXACT, source=_POOL_SOURCE
        )
        sizes = {"xlite TP": self.tp_size, "xlite DP": self.dp_size, "xlite EP": self.moe_ep_size}
        self.communicators = {name: device.hccl.communicator(name, size) for name, size in sizes.items() if size > 1}
        model = RankModel(
            config=ModelConfig(def_tp_size=self.tp_size, def_dp_size=self.dp_size, block_size=1),
            device=_device_facts(device.card),
            environment=Environment.from_mapping(platform_environment()),
            version=platform_xlite_version(),
            rank=self.rank,
        )
        _charge(device.card, model, When.INIT_TENSOR_POOL)
        self.pool = TensorPool(Arena(size_mb << 20), bits_round_up=model.behaviour.bits_round_up)
        return 0

    def first_forward(self, model: RankModel) -> None:
        """Take what the first forward takes."""
        if not self._has_run_forward:
            self._has_run_forward = True
            _charge(self.device.card, model, When.FIRST_FORWARD)


def platform_environment() -> dict[str, str]:
    """The environment that the active world gives vendor software."""
    return getattr(platform(), "environment", dict(os.environ))


def platform_xlite_version() -> str:
    """The release of xlite that the active world imitates."""
    version: str = platform().xlite_version  # type: ignore[attr-defined]
    return version


class NativeModel:
    """What ``Model.init`` makes of a configuration and weights.

    Args:
        config: Object with xlite's configuration fields.
        weights: Object with xlite's weight attributes.
        rank: Rank in the world.

    Raises:
        RuntimeError: Lists of the wrong length, experts that do not divide, an int8 weight without its scale.
    """

    def __init__(self, config: object, weights: Any, rank: int) -> None:
        settings = ModelConfig.from_object(config)
        _check_lengths(settings, weights)
        card = platform().runtimes[platform().current_device()].card
        self.rank_model = RankModel(
            config=settings,
            device=_device_facts(card),
            weights=_weight_facts(settings, weights),
            environment=Environment.from_mapping(platform_environment()),
            version=platform_xlite_version(),
            rank=rank,
        )
        _charge(card, self.rank_model, When.MODEL_INIT)

    def tensor_pool_megabytes(self) -> int:
        """What ``get_tensor_pool_size`` returns."""
        return tensor_pool_size(self.rank_model).megabytes

    def forward(
        self,
        runtime: Runtime,
        source: torch.Tensor,
        attn_meta: Any,
        kv_cache: Sequence[Sequence[Any]],
        output: torch.Tensor,
    ) -> None:
        """Run the forward's allocations in the runtime's pool and overwrite ``output``'s first rows.

        Raises:
            RuntimeError: xlite's own checks, or a pool that is too small.
            UnmodelledCallError: In a world of real values, which this does not compute.
        """
        model = self.rank_model.at_run_time()
        num_tokens = source.shape[0]
        if num_tokens == 0:
            return
        self._check_forward(runtime, attn_meta, kv_cache, num_tokens, output)
        if isinstance(platform().values, RealValues):
            raise UnmodelledCallError("xlite._C.Model.forward computes no values yet; run the world in shape mode")
        assert runtime.pool is not None
        runtime.first_forward(model)
        for name, group in (("xlite TP", model.tp), ("xlite DP", model.dp)):
            if group.size > 1 and not group.uses_xccl:
                runtime.communicators[name].operate()
        step = Step.of(model, list(attn_meta.lens), list(attn_meta.cached_lens))
        forward(ForwardPass(model, runtime.pool, step), Tensor(tuple(output.shape), _dtype("output", output)))
        runtime.device.card.launch("xlite", runtime.device.current_stream())
        platform().values.forget([output[:num_tokens]])

    def _check_forward(
        self, runtime: Runtime, meta: Any, kv_cache: Sequence[Sequence[Any]], num_tokens: int, output: torch.Tensor
    ) -> None:
        config = self.rank_model.config
        if runtime.pool is None:
            raise RuntimeError("model.cpp: tensor pool is not initialized")
        if (runtime.rank, runtime.tp_size, runtime.dp_size) != (
            self.rank_model.rank,
            config.def_tp_size,
            config.def_dp_size,
        ):
            raise RuntimeError("model.cpp: rank, tp or dp size of the runtime differs from the model's")
        if num_tokens > output.shape[0]:
            raise RuntimeError(f"model.cpp: input has {num_tokens} rows, output {output.shape[0]}")
        if not 1 <= sum(meta.lens) <= self.rank_model.max_m:
            raise RuntimeError(f"model.cpp: {sum(meta.lens)} tokens, must be in 1..{self.rank_model.max_m}")
        if len(kv_cache) < config.n_layers:
            raise RuntimeError(f"model.cpp: {len(kv_cache)} layers of kv cache, the model has {config.n_layers}")
        if len(meta.block_tables_cpu) < len(meta.lens):
            raise RuntimeError(f"model.cpp: {len(meta.block_tables_cpu)} block tables for {len(meta.lens)} requests")
        for length, cached, table in zip(meta.lens, meta.cached_lens, meta.block_tables_cpu, strict=False):
            if len(table) < -(-(length + cached) // config.block_size):
                raise RuntimeError(f"model.cpp: block table of {len(table)} entries for {length + cached} tokens")


def _check_lengths(config: ModelConfig, weights: Any) -> None:
    n_layers, n_dense = config.n_layers, config.n_dense_layers
    if n_layers < n_dense:
        raise RuntimeError(f"model.cpp: n_layers {n_layers} < n_dense_layers {n_dense}")
    n_moe = n_layers - n_dense
    expected = dict.fromkeys(("attn_norm", "attn_out", "mlp_norm"), n_layers)
    expected |= dict.fromkeys(("mlp_up_gate", "mlp_down"), n_dense)
    if n_moe:
        if config.n_routed_experts % config.moe_ep_size:
            raise RuntimeError(
                f"model.cpp: {config.n_routed_experts} experts do not divide by EP size {config.moe_ep_size}"
            )
        expected["gate"] = n_moe
        expected |= dict.fromkeys(("re_up_gate", "re_down"), n_moe * config.n_routed_experts // config.moe_ep_size)
    for name, length in expected.items():
        if len(getattr(weights, name)) != length:
            raise RuntimeError(f"model.cpp: {name} has {len(getattr(weights, name))} tensors, must have {length}")


def _dtype(name: str, tensor: torch.Tensor) -> DType:
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        raise RuntimeError(f"model.cpp: {name} has the unsupported type {tensor.dtype}") from None


def _weight_facts(config: ModelConfig, weights: Any) -> WeightFacts:
    def quantised(family: str) -> QuantKind:
        tensors = getattr(weights, family)
        if not tensors:
            return QuantKind.NONE
        return QuantKind.of(
            f"{family}[0]",
            _dtype(family, tensors[0]),
            has_input_scale=bool(getattr(weights, f"{family}_input_scale", ())),
            has_input_offset=bool(getattr(weights, f"{family}_input_offset", ())),
            has_deq_scale=bool(getattr(weights, f"{family}_deq_scale", ())),
        )

    dtype = _dtype("embed", weights.embed)
    families = [field.name for field in fields(WeightFacts) if field.type == "QuantKind"]
    return WeightFacts(
        dtype=dtype,
        gate_dtype=_dtype("gate", weights.gate[0]) if weights.gate else dtype,
        experts_quantised=bool(weights.re_up_gate) and _dtype("re_up_gate", weights.re_up_gate[0]) != dtype,
        mlp_width=weights.mlp_down[0].shape[-1] if weights.mlp_down and config.n_dense_layers else None,
        shared_width=weights.se_down[0].shape[-1] if weights.se_down else None,
        **{family: quantised(family) for family in families},
    )
