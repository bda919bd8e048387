"""What torch_npu and HCCL reduce, refuse and pad in a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.device.clock import NS_PER_S
from npusim.hccl.ranks import Arrival
from npusim.ops.refusal import refusal
from npusim.torch_backend.runtime import DeviceRuntime
from npusim.torch_backend.tensors import new_like
from npusim.torch_backend.vendor_errors import vendor_error

INVALID_PARAMETER = "ERR02001 DIST invalid parameter"
INVALID_TYPE = "ERR02002 DIST invalid type"
NOT_SUPPORTED = "ERR02007 DIST feature not supported"

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0),
    "AVG": lambda stacked: stacked.sum(0) / len(stacked),
    "MAX": lambda stacked: stacked.amax(0),
    "MIN": lambda stacked: stacked.amin(0),
    "PRODUCT": lambda stacked: stacked.prod(0),
}
_NOT_REDUCED = {
    torch.float64: "at::kDouble",
    torch.float8_e4m3fn: "at::ScalarType::Float8_e4m3fn",
    torch.float8_e5m2: "at::ScalarType::Float8_e5m2",
}
"""Types that HCCL does not reduce on A2 and A3. Exact: golden records and torch_npu 2.13.0."""
_NOT_REDUCE_SCATTERED = {**_NOT_REDUCED, torch.uint8: "at::kByte/at::kBool", torch.bool: "at::kByte/at::kBool"}
REDUCED_AS_INT32 = (torch.bool, torch.uint8)
"""Types of which an int32 copy is reduced. Exact: golden records and torch_npu 2.13.0."""
_ALL_GATHER_ALIGNMENT_BYTES = 512
"""To a multiple of this size ``all_gather`` into a list pads its tensors. Exact: torch_npu 2.13.0, Ascend910B3."""


def check_wait(runtime: DeviceRuntime, arrival: Arrival) -> None:
    """Check that no rank waited for another one longer than ``HCCL_EXEC_TIMEOUT`` allows.

    The text is that of public logs (vllm-ascend issue #1443); there the next synchronization raises it, here the
    collective itself. Grade of that: assumed.

    Raises:
        RuntimeError: One did.
    """
    timeout_s = runtime.hccl.settings.exec_timeout_s
    if not timeout_s or arrival.spread_ns <= timeout_s * NS_PER_S:
        return
    runtime.card.clock.wait_until(arrival.time_ns - arrival.spread_ns + timeout_s * NS_PER_S)
    error = vendor_error(
        RuntimeError,
        "NPU function error: AclrtSynchronizeStreamWithTimeout, error code is 507048",
        "ERR00100 PTA call acl api failed\n[Error]: The execution of the internal task times out.\n"
        "        Rectify the fault based on the error information in the ascend log.\n"
        "EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not received the "
        "Notify record from remote rank [unknown].",
    )
    error.add_note(f"ranks were {arrival.spread_ns / NS_PER_S:g} s apart, HCCL_EXEC_TIMEOUT allows {timeout_s} s")
    raise error


def reduction(op: Any, tensor: Tensor, call: str) -> str:
    """Name of a reduction.

    Args:
        op: torch's reduction.
        tensor: What is to be reduced.
        call: torch_npu's name of the collective.

    Raises:
        RuntimeError: It cannot be done, or not on the device with this type; in torch_npu's words.
    """
    name = str(op.op).rpartition(".")[2]
    refused = _NOT_REDUCE_SCATTERED if "scatter" in call else _NOT_REDUCED
    if tensor.device.type == "npu" and tensor.dtype in refused:
        raise refusal(f"HCCL {call}: Unsupported data type {refused[tensor.dtype]}", NOT_SUPPORTED)
    if name not in _REDUCTIONS:
        raise refusal(f"Cannot use ReduceOp.{name} with HCCL", NOT_SUPPORTED)
    return name


def reduced(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The reduction of host tensors."""
    return _REDUCTIONS[name](torch.stack(list(parts))).to(parts[0].dtype)


def padding_of(tensor: Tensor) -> int:
    """Elements that ``all_gather`` into a list adds to a tensor."""
    return -tensor.numel() * tensor.element_size() % _ALL_GATHER_ALIGNMENT_BYTES // tensor.element_size()


def padded(tensor: Tensor, padding: int) -> Tensor:
    """The device memory of a tensor that it pads; of booleans by way of int32."""
    size = (tensor.numel() + padding,)
    if tensor.dtype is not torch.bool:
        return new_like(tensor, size)
    narrow = new_like(tensor, tensor.shape, torch.int32)
    wide = new_like(narrow, size)
    del narrow
    result = new_like(tensor, size)
    del wide
    return result
