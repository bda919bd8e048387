"""The double of ``fla_npu.ops.ascendc``: the names that vllm-ascend 0.30.0rc2 imports; calling one raises."""

from __future__ import annotations

from typing import Any, NoReturn

from npusim.errors import UnmodelledCallError


class _Unmodelled:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise UnmodelledCallError(f"fla_npu.ops.ascendc.{self.__name__} is not modelled on the simulated device")


causal_conv1d_fn = _Unmodelled("causal_conv1d_fn")
causal_conv1d_update = _Unmodelled("causal_conv1d_update")
chunk_kda_fwd = _Unmodelled("chunk_kda_fwd")
recurrent_gated_delta_rule = _Unmodelled("recurrent_gated_delta_rule")
recurrent_kda = _Unmodelled("recurrent_kda")
