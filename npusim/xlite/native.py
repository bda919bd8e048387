"""xlite's native objects, over a driver: what ``xlite._C`` holds behind its names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from npusim.device.hbm import OutOfHbmError
from npusim.errors import UnmodelledNameError
from npusim.hccl.ranks import Arrival
from npusim.ops.parts import Part
from npusim.torch_backend.registration import platform
from npusim.xlite.arena import Arena
from npusim.xlite.checks import check_forward, check_weights
from npusim.xlite.config import Environment, ModelConfig, QuantKind, WeightFacts
from npusim.xlite.driver import Communicator, Driver, SimulatedDriver
from npusim.xlite.forward import forward
from npusim.xlite.forward_pass import ForwardPass, Step
from npusim.xlite.native_fields import UNSIGNED, incompatible
from npusim.xlite.outside_pool import When, outside_pool
from npusim.xlite.pool import tensor_pool_size
from npusim.xlite.rank_model import RankModel
from npusim.xlite.tensors import DType, Tensor, TensorPool
from npusim.xlite.values import Batch, ForwardValues, check_has_values
from npusim.xlite.work import Lengths

_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16, torch.float32: DType.FP32, torch.int8: DType.INT8}
_SIGNATURE = (
    "xlite._C.Runtime(devid: typing.SupportsInt, size: typing.SupportsInt = 0, rank: typing.SupportsInt = 0, tp_size: "
    "typing.SupportsInt = 1, dp_size: typing.SupportsInt = 1, moe_tp_size: typing.SupportsInt = 1, moe_ep_size: "
    "typing.SupportsInt = 1)"
)


def _take(driver: Driver, owner: object, device: int, model: RankModel, when: When) -> None:
    for allocation in outside_pool(model):
        if allocation.when is when:
            driver.take_outside(owner, device, allocation)


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

    _driver: Driver = SimulatedDriver()

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
        numbers = (devid, size, rank, tp_size, dp_size, moe_tp_size, moe_ep_size)
        try:
            devid, size, rank, tp_size, dp_size, moe_tp_size, moe_ep_size = map(UNSIGNED.convert, numbers)
        except TypeError:
            raise incompatible("__init__", _SIGNATURE, ", ".join(map(repr, numbers))) from None
        self.devid, self.rank = devid, rank
        self.tp_size, self.dp_size = tp_size, dp_size
        self.moe_tp_size, self.moe_ep_size = moe_tp_size, moe_ep_size
        self.pool: TensorPool | None = None
        self.communicators: dict[str, Communicator] = {}
        self._has_run_forward = False
        self._num_reductions = 0
        self.init_tensor_pool(size)

    def init_tensor_pool(self, size_mb: int) -> int:
        """Take the pool, open communicators; a later call, and one with 0, does nothing. Returns 0.

        Raises:
            TypeError: ``size_mb`` is no unsigned number.
            RuntimeError: The device has no room for the pool.
        """
        try:
            size_mb = UNSIGNED.convert(size_mb)
        except TypeError:
            signature = "(self: xlite._C.Runtime, size: typing.SupportsInt) -> int"
            raise incompatible("init_tensor_pool", signature, f"<xlite._C.Runtime object>, {size_mb!r}") from None
        if size_mb == 0 or self.pool is not None:
            return 0
        driver = self._driver
        try:
            driver.take_pool(self, self.devid, size_mb << 20)
        except OutOfHbmError as error:
            raise RuntimeError("XRuntime: tensor pool initialization failed") from error
        sizes = {"xlite TP": self.tp_size, "xlite DP": self.dp_size, "xlite EP": self.moe_ep_size}
        self.communicators = {
            name: driver.communicator(self.devid, name, size) for name, size in sizes.items() if size > 1
        }
        model = RankModel(
            config=ModelConfig(def_tp_size=self.tp_size, def_dp_size=self.dp_size, block_size=1),
            device=driver.facts(self.devid),
            environment=Environment.from_mapping(driver.environment),
            version=driver.version,
            rank=self.rank,
        )
        _take(driver, self, self.devid, model, When.INIT_TENSOR_POOL)
        self.pool = TensorPool(Arena(size_mb << 20), bits_round_up=model.behaviour.bits_round_up)
        return 0

    def first_forward(self, model: RankModel) -> None:
        """Take what the first forward takes."""
        if not self._has_run_forward:
            self._has_run_forward = True
            _take(self._driver, self, self.devid, model, When.FIRST_FORWARD)

    def all_reduce_values(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of a host tensor over the TP ranks, in float32, rounded once."""
        self._num_reductions += 1
        tp_rank, total = self.rank % self.tp_size, torch.empty_like(part)
        group = f"xlite TP from device {self.devid - tp_rank}", self._num_reductions

        def finish(parts: list[Part], receivers: Sequence[int]) -> None:
            tensors = [tensor.float() for each in parts for tensor in each.inputs if tensor is not None]
            for rank in receivers:
                parts[rank].outputs[0].copy_(torch.stack(tensors).sum(0))

        own = Part([part], [total], None, Arrival(0))
        platform().ranks.meet(group, tp_rank, self.tp_size, "xlite all-reduce", own, finish)
        return total

    def __getattr__(self, name: str) -> Any:
        raise UnmodelledNameError(f"xlite._C.Runtime.{name} is not modelled on the simulated device")


class NativeModel:
    """What ``Model.init`` makes of a configuration and weights.

    Args:
        config: Object with xlite's configuration fields.
        weights: Object with xlite's weight attributes.
        rank: Rank in the world.
        driver: The devices; memory is taken on the current one.

    Raises:
        ValueError: Lists of the wrong length, experts that do not divide, an int8 weight without its scale.
    """

    def __init__(self, config: object, weights: Any, rank: int, driver: Driver) -> None:
        settings = ModelConfig.from_object(config)
        check_weights(settings, weights, driver.version)
        device = driver.current_device()
        self._driver = driver
        self.rank_model = RankModel(
            config=settings,
            device=driver.facts(device),
            weights=_weight_facts(settings, weights),
            environment=Environment.from_mapping(driver.environment),
            version=driver.version,
            rank=rank,
        )
        _take(driver, self, device, self.rank_model, When.MODEL_INIT)

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
        weights: Any,
        freqs_cis: torch.Tensor,
        method: str,
    ) -> None:
        """Run the forward's allocations in the runtime's pool and overwrite ``output``'s first rows.

        Every further layer of a kind takes the same from the pool again, so one of each kind is run.

        Raises:
            RuntimeError: xlite's own checks, or a pool that is too small.
            UnmodelledCallError: In a world of real values, for a model whose values are not modelled.
        """
        model = self.rank_model.at_run_time()
        num_tokens = source.shape[0]
        if num_tokens == 0:
            return
        batch = Batch.of(attn_meta)
        check_forward(model, runtime, batch, kv_cache, source.shape, output.shape, method)
        computes = self._driver.computes_values
        if computes:
            check_has_values(model, source)
        assert runtime.pool is not None
        runtime.first_forward(model)
        for name, group in (("xlite TP", model.tp), ("xlite DP", model.dp)):
            if group.size > 1 and not group.uses_xccl:
                runtime.communicators[name].operate()
        step = Step.of(model, batch.lens, batch.cached_lens)
        allocations = ForwardPass(model.shortened(), runtime.pool, step)
        forward(allocations, Tensor(tuple(output.shape), _dtype("output", output)))
        self._driver.launch(runtime.devid, model, Lengths(batch.lens, batch.cached_lens))
        if computes:
            values = ForwardValues(model, weights, batch, kv_cache, freqs_cis, runtime.all_reduce_values)
            hidden_states = values(source)
            platform().values.write(output[: len(hidden_states)], hidden_states)
        else:
            self._driver.forget(output[:num_tokens])


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
