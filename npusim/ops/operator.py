"""How an operator is declared: a schema, a function that allocates as torch_npu does, and how its values are computed.

A declaration is a few lines::

    @operator("npu::npu_swiglu(Tensor self, int dim=-1) -> Tensor", computes=swiglu)
    def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
        return new_like(self, halved(self.shape, dim))

The function body makes the operator's results, and its temporaries as local variables, in torch_npu's order, so that the
caching allocator sees what it would see on a card. ``computes`` gets the same arguments on the host.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npusim.torch_backend.registration import kernel, platform
from npusim.torch_backend.tensors import lowered, new_on, runtime_of, simulated_in

SYSTEM_WORKSPACE_BYTES = 16 << 20
"""Workspace of a kernel that uses cube and vector cores on A2/A3, on top of the user's part. Grade: exact; source: the
tiling code of vllm-ascend's own operators (csrc)."""


@dataclass(frozen=True)
class Operator:
    """A declared operator: torch's kernel for it on device ``npu``.

    Attributes:
        name: ``namespace::name`` with the overload, if it has one.
        allocate: Makes results and temporaries.
        computes: Computes the results on host tensors; None if only shapes are modelled.
        writes: Positions of arguments that the operator writes to.
        workspace_bytes: Bytes of workspace during the call, given the arguments.
    """

    name: str
    allocate: Callable[..., Any]
    computes: Callable[..., Any] | None
    writes: tuple[int, ...]
    workspace_bytes: Callable[..., int] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator: allocate, take and give back its workspace, charge its launch, attach values."""
        values = platform().values
        inputs = simulated_in((*args, *kwargs.values()))
        results = self.allocate(*args, **kwargs)
        runtime = runtime_of(inputs[0].device if inputs else _first(results).device)
        if self.workspace_bytes is not None:
            take_workspace(runtime, self.workspace_bytes(*args, **kwargs))
        runtime.card.launch(self.name, runtime.current_stream())
        written = [args[position] for position in self.writes]
        outputs = [t for t in _tensors(results) if not any(t is target for target in inputs)]
        if self.computes is None:
            values.forget(written)
        elif values.known(inputs):
            computes = self.computes

            def compute(*hosts: torch.Tensor) -> Any:
                replacements = iter(hosts)
                host_args = lowered(args, replacements)
                host_kwargs = {key: lowered(value, replacements) for key, value in kwargs.items()}
                return computes(*host_args, **host_kwargs)

            if written:
                values.update([*written, *outputs], inputs, compute)
            else:
                values.compute(outputs, inputs, compute)
        else:
            values.forget(written)
        return results


def operator(
    schema: str,
    *,
    computes: Callable[..., Any] | None = None,
    writes: Sequence[str] = (),
    workspace_bytes: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Operator]:
    """Declare an operator of device ``npu``.

    Args:
        schema: ``namespace::name(arguments) -> results`` defines the operator and its kernel; ``aten::name.overload``
            alone gives one of torch's own operators a kernel.
        computes: Its results from host tensors; called with the operator's arguments. If the operator writes to arguments,
            their new values come first, in the order of ``writes``, then those of new results.
        writes: Names of the arguments it writes to.
        workspace_bytes: Workspace during the call, from the same arguments.
    """
    namespace, _, rest = schema.partition("::")
    name = rest.partition("(")[0]

    def declare(allocate: Callable[..., Any]) -> Operator:
        parameters = list(inspect.signature(allocate).parameters)
        positions = tuple(parameters.index(argument) for argument in writes)
        declared = Operator(f"{namespace}::{name}", allocate, computes, positions, workspace_bytes)
        kernel(namespace, name, rest if "(" in rest else None)(declared.__call__)
        return declared

    return declare


def take_workspace(runtime: Any, num_bytes: int) -> None:
    """An operator's workspace for the length of one call: from the caching allocator, or from the stream's own.

    ``TASK_QUEUE_ENABLE`` 0 and 1 take it from the caching allocator, 2 from the workspace allocator (exact; op-plugin
    ``op_api_common.h``).
    """
    if num_bytes <= 0:
        return
    if runtime.task_queue_level < 2:
        new_on(runtime, (num_bytes,), torch.uint8)
    else:
        runtime.workspaces.malloc(num_bytes, runtime.current_stream())
        runtime.workspaces.free()


def _tensors(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for tensor in results or () if isinstance(tensor, torch.Tensor)]


def _first(results: Any) -> torch.Tensor:
    return _tensors(results)[0]
