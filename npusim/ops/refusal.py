"""What torch_npu says when it refuses a call: the texts of its checks, without the time and process that it adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

INVALID_PARAMETER = "ERR01001 OPS invalid parameter"
INVALID_TYPE = "ERR01002 OPS invalid type"
INVALID_VALUE = "ERR01003 OPS invalid value"
NOT_SUPPORTED = "ERR01007 OPS feature not supported"


_TYPE_NAMES = {
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
}


def type_name(dtype: torch.dtype) -> str:
    """A type as torch's C++ prints it."""
    return _TYPE_NAMES.get(dtype, str(dtype).removeprefix("torch.").capitalize())


def refusal(text: str, code: str = INVALID_PARAMETER) -> RuntimeError:
    """The error that an operator of torch_npu raises when a check fails."""
    return RuntimeError(f"{text}\n[ERROR] {code}")


def wrong_device(hosts: Sequence[Tensor]) -> None:
    """The check of operators whose wrapper has none: numbers on the host are taken, other host tensors are not.

    Raises:
        RuntimeError: In torch_npu's words.
    """
    if any(tensor.dim() for tensor in hosts):
        raise refusal(
            "Expected all tensors to be on the same device. Expected NPU tensor, please check whether the input "
            "tensor device is correct.",
            INVALID_TYPE,
        )


def devices_differ(
    operator: str, parameters: Sequence[str], outs: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """The check that torch generates into an operator's wrapper: all its tensors are on the device of the first one.

    Arguments that only take a result are looked at first.

    Raises:
        RuntimeError: In torch's words.
    """
    namespace, _, name = operator.partition("::")
    name, _, overload = name.partition(".")
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    common = None
    for parameter in (*outs, *(name for name in parameters if name not in outs)):
        value = given.get(parameter)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            common = common or tensor.device
            if tensor.device != common:
                suffix = f"{name}_out" if outs else name
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but got {parameter} is on {tensor.device}, "
                    f"different from other tensors on {common} (when checking argument in method "
                    f"wrapper_{'NPU_' if namespace == 'aten' else ''}{overload}_{suffix})"
                )
