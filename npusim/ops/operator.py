"""How an operator is declared: its name, a function that allocates as torch_npu does, and how its values are computed.

A declaration is a few lines::

    @operator("npu::npu_swiglu", computes=swiglu)
    def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
        return new_like(input, halved(input.shape, dim))

The function body makes the operator's results, and its temporaries as local variables, in torch_npu's order, so that
the caching allocator sees what it would see on a card. It names the arguments that matter; ``**_`` takes the others.
``computes`` gets the same arguments on the host; an operator of torch itself that says nothing is computed by torch's
CPU kernel. The vendor's schemas are in ``schemas.txt``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from npusim.ops.refusal import devices_differ, wrong_device
from npusim.ops.work import WAITS, WORK, Call, ProductOf, WorkOf
from npusim.torch_backend.registration import kernel, platform
from npusim.torch_backend.runtime import DeviceRuntime
from npusim.torch_backend.tensors import new_on

IN_BODY: Any = object()
"""As ``computes``: the function that allocates also attaches the values."""

SYSTEM_WORKSPACE_BYTES = 16 << 20
"""Workspace of a kernel that uses cube and vector cores on A2/A3, on top of the user's part. Grade: exact; source: the
tiling code of vllm-ascend's own operators (csrc)."""


class Hosts(Enum):
    """What an operator does with host tensors among its arguments."""

    REFUSED = "torch's generated wrapper refuses them"
    NUMBERS = "torch_npu takes those without dimensions and refuses others"
    TAKEN = "they are taken as they are"


DECLARED: dict[str, Operator] = {}
"""Every operator that has been declared, by its name."""


@dataclass(frozen=True)
class Operator:
    """A declared operator: torch's kernel for it on device ``npu``.

    Attributes:
        name: ``namespace::name`` with the overload, if it has one.
        parameters: Names of its arguments.
        positions: Their places.
        outs: Those of them that only take a result.
        allocate: Makes results and temporaries.
        computes: Computes the results on host tensors; None if only shapes are modelled.
        writes: Names of the arguments that it writes to.
        overwrites: Those of them whose old values it does not read.
        is_product: Whether it multiplies matrices, so that a world of shapes does not compute it.
        hosts: What becomes of host tensors among its arguments.
        workspace_bytes: Bytes of workspace during the call, given the arguments.
        has_numbers: Whether its results have numbers, from ``computes`` or from ``allocate`` itself.
        work: What it moves and multiplies; None if it reads its device tensors and writes its results.
        waits: Whether the host waits for its results.
    """

    name: str
    parameters: tuple[str, ...]
    positions: Mapping[str, int]
    outs: tuple[str, ...]
    allocate: Callable[..., Any]
    computes: Callable[..., Any] | None
    writes: tuple[str, ...]
    overwrites: tuple[str, ...]
    is_product: bool
    hosts: Hosts
    workspace_bytes: Callable[..., int] | None
    has_numbers: bool
    work: WorkOf | None
    waits: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator: allocate, take and give back its workspace, launch it, attach values."""
        active = platform()
        inputs: list[Tensor] = []
        hosts: list[Tensor] = []
        sort_tensors(args, inputs, hosts)
        if kwargs:
            sort_tensors(kwargs.values(), inputs, hosts)
        if hosts:
            if self.hosts is Hosts.REFUSED:
                devices_differ(self.name, self.parameters, self.outs, args, kwargs)
            elif self.hosts is Hosts.NUMBERS:
                wrong_device(hosts)
        results = self.allocate(*args, **kwargs)
        outputs = tensors_in(results)
        if not inputs and not outputs:
            return results
        runtime = active.runtimes[(inputs or outputs)[0].device.index]
        if self.workspace_bytes is not None:
            take_workspace(
                runtime, self.workspace_bytes(*args, **kwargs), always_cached=self.name.startswith("_C_ascend")
            )
        card = runtime.card
        if self.work is None:
            num_bytes = 0
            for tensor in inputs:
                num_bytes += tensor.nbytes
            for tensor in outputs:
                num_bytes += tensor.nbytes
            duration_ns = card.costs.vector_ns(num_bytes)
        elif isinstance(self.work, ProductOf) and not kwargs:  # the same as below, without what most calls need not ask
            first, second = args[self.positions[self.work.left]], args[self.positions[self.work.right]]
            duration_ns = card.costs.product_ns(
                first.shape, second.shape, second.itemsize, outputs[0].nbytes, self.work.transposed
            )
        else:
            duration_ns = card.costs.kernel_ns(self.work(Call(self.positions, args, kwargs, results)))
        stream = runtime.current_stream()
        card.launch(self.name, stream, duration_ns)
        if self.waits:
            card.streams.synchronize_stream(stream)
        written = tensors_in([self._argument(name, args, kwargs) for name in self.writes]) if self.writes else []
        values = active.values
        if self.overwrites:
            inputs = self._read(args, kwargs)
        if self.computes is None or (self.is_product and not values.multiplies) or not values.known(inputs):
            values.forget(written)
            return results
        compute = _Computation(self, args, kwargs)
        if written:
            new = [tensor for tensor in outputs if not any(tensor is target for target in written)]
            values.update([*written, *new], inputs, compute)
        else:
            values.compute(outputs, inputs, compute)
        return results

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The simulated tensors that are read; one of them may be written as well, as another argument."""
        named = [*zip(self.parameters, args, strict=False), *kwargs.items()]
        inputs: list[Tensor] = []
        sort_tensors([value for name, value in named if name not in self.overwrites], inputs, [])
        return inputs

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = self.parameters.index(name)
        return args[position] if position < len(args) else None


class _Device:
    """Stands for a simulated tensor among the arguments of a computation that may run much later.

    The tensor itself must not be kept: its memory would live as long as a result that nobody has read.
    """


_DEVICE = _Device()


class _Computation:
    """An operator's arguments without their device tensors, to be completed by host tensors."""

    def __init__(self, declared: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = declared.parameters
        hidden = declared.overwrites
        self._computes = declared.computes
        self._args = [
            None if hidden and names[position] in hidden else _without_tensors(value)
            for position, value in enumerate(args)
        ]
        self._kwargs = {name: None if name in hidden else _without_tensors(value) for name, value in kwargs.items()}

    def __call__(self, *hosts: Tensor) -> Any:
        assert self._computes is not None
        replacements = iter(hosts)
        args = [_with_tensors(value, replacements) for value in self._args]
        kwargs = {name: _with_tensors(value, replacements) for name, value in self._kwargs.items()}
        return self._computes(*args, **kwargs)


def operator(
    name: str,
    *,
    computes: Callable[..., Any] | None = None,
    writes: Sequence[str] = (),
    overwrites: Sequence[str] = (),
    is_product: bool = False,
    hosts: Hosts = Hosts.REFUSED,
    workspace_bytes: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Operator]:
    """Declare an operator of device ``npu``.

    Args:
        name: ``namespace::name`` or ``namespace::name.overload``: one of torch's own operators (``aten``), or a
        vendor's
            with a schema in ``schemas.txt``.
        computes: Its results from host tensors; called with the operator's arguments. If the operator writes to
        arguments,
            their new values come first, in the order of ``writes``, then those of new results. Default: for torch's own
            operators their CPU kernel, for others nothing.
        writes: Names of the arguments it writes to.
        overwrites: Those of them that it does not read; ``computes`` gets None in their place.
        is_product: Whether it multiplies matrices.
        hosts: What becomes of host tensors among its arguments.
        workspace_bytes: Workspace during the call, from the same arguments.
    """
    namespace, _, unqualified = name.partition("::")
    schema = None if namespace == "aten" else schemas()[name]
    arguments = (_aten(unqualified)._schema if schema is None else torch._C.parse_schema(schema)).arguments
    parameters = tuple(argument.name for argument in arguments)
    computation = computes
    if computes is IN_BODY:
        computation = None
    elif computation is None and namespace == "aten":
        computation = _HostKernel(unqualified, tuple(parameters.index(argument) for argument in writes))

    def declare(allocate: Callable[..., Any]) -> Operator:
        declared = Operator(
            name,
            parameters,
            {parameter: position for position, parameter in enumerate(parameters)},
            tuple(argument.name for argument in arguments if argument.is_out),
            allocate,
            computation,
            tuple(writes),
            tuple(overwrites),
            is_product,
            hosts,
            workspace_bytes,
            computes is IN_BODY or computation is not None,
            WORK.get(name),
            name in WAITS,
        )
        DECLARED[name] = declared
        is_factory = schema is not None and not any("Tensor" in str(argument.type) for argument in arguments)
        key = "BackendSelect" if is_factory else "PrivateUse1"
        kernel(namespace, unqualified, schema and schema.partition("::")[2], dispatch_key=key)(declared.__call__)
        return declared

    return declare


@cache
def schemas() -> dict[str, str]:
    """The vendor's schemas by operator, those of operators that are not modelled included."""
    lines = (files("npusim.ops") / "schemas.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition("(")[0]: line for line in lines if line and not line.startswith("#")}


def _aten(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class _HostKernel:
    """One of torch's own operators on host tensors; copies of what it writes to come before its results."""

    def __init__(self, name: str, writes: tuple[int, ...]) -> None:
        self._kernel = _aten(name)
        self._writes = writes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._writes:
            return self._kernel(*args, **kwargs)
        written = [args[position].clone() for position in self._writes]
        arguments = list(args)
        for position, copy in zip(self._writes, written, strict=True):
            arguments[position] = copy
        results = tensors_in(self._kernel(*arguments, **kwargs))
        return [*written, *(tensor for tensor in results if not any(tensor is copy for copy in written))]


def take_workspace(runtime: DeviceRuntime, num_bytes: int, *, always_cached: bool = False) -> None:
    """An operator's workspace for the length of one call: from the caching allocator, or from the stream's own.

    ``TASK_QUEUE_ENABLE`` 0 and 1 take it from the caching allocator, 2 from the workspace allocator (exact; op-plugin
    ``op_api_common.h``). vllm-ascend's operators take a tensor always (exact; its ``op_api_common.h``).
    """
    if num_bytes <= 0:
        return
    if always_cached or runtime.task_queue_level < 2:
        new_on(runtime, (num_bytes,), torch.uint8)
    else:
        runtime.workspaces.malloc(num_bytes, runtime.current_stream())
        runtime.workspaces.free()


def sort_tensors(values: Any, simulated: list[Tensor], hosts: list[Tensor]) -> None:
    """Append the tensors among ``values``, those in lists included, to one of two lists."""
    for value in values:
        if isinstance(value, Tensor):
            (hosts if value.is_cpu else simulated).append(value)
        elif isinstance(value, (list, tuple)):
            sort_tensors(value, simulated, hosts)


def tensors_in(results: Any) -> list[Tensor]:
    """The tensors that an operator returned, those in lists included."""
    if isinstance(results, Tensor):
        return [results]
    if isinstance(results, (list, tuple)):
        return [tensor for result in results for tensor in tensors_in(result)]
    return []


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_cpu else _DEVICE
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item) for item in value]
    return value


def _with_tensors(value: Any, hosts: Iterator[Tensor]) -> Any:
    if value is _DEVICE:
        return next(hosts)
    if isinstance(value, list):
        return [_with_tensors(item, hosts) for item in value]
    return value
