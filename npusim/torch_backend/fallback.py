"""What an ``aten`` operator without a kernel of its own does: shapes by torch's meta kernels, values by its CPU ones.

Grade: assumed where torch_npu would allocate temporaries, too; those operators get kernels of their own in
``npusim.ops``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from npusim.errors import UnmodelledCallError
from npusim.torch_backend.factories import empty_strided
from npusim.torch_backend.registration import platform
from npusim.torch_backend.shells import CPU_KEYS
from npusim.torch_backend.storage import contiguous_stride
from npusim.torch_backend.tensors import is_simulated, new_on, runtime_of

_as_strided = torch.ops.aten.as_strided.default

SHAPE_FOLLOWS_VALUES = frozenset(
    {
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::repeat_interleave.Tensor",
        "aten::bincount",
        "aten::index.Tensor.bool",
    }
)
"""Operators whose output size depends on the numbers in their inputs."""


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same geometry."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _name(op: Any) -> str:
    overload = op._overloadname
    name: str = op._schema.name
    return name if overload in ("", "default") else f"{name}.{overload}"


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on simulated tensors.

    Raises:
        UnmodelledCallError: It is not one of torch's own operators, or one whose shapes torch cannot tell.
    """
    name = _name(op)
    if op.namespace != "aten":
        raise UnmodelledCallError(f"operator {name} is not modelled on the simulated device")
    leaves, spec = pytree.tree_flatten((args, kwargs))
    inputs = [leaf for leaf in leaves if is_simulated(leaf)]
    device = (
        inputs[0].device if inputs else torch.device("npu", runtime_of(_device_argument(op, args, kwargs)).card.index)
    )

    run = _Call(op, leaves, spec)
    values = platform().values
    if name in SHAPE_FOLLOWS_VALUES:
        results = run([values.read(tensor) for tensor in inputs], "cpu")
        return pytree.tree_map_only(torch.Tensor, lambda host: _upload(host, device), results)
    metas = [stand_in(tensor) for tensor in inputs]
    try:
        shapes = run(metas, "meta")
    except NotImplementedError:
        raise UnmodelledCallError(f"operator {name} is not modelled on the simulated device") from None
    written, overwritten = _written(op, args, kwargs)
    if written:
        return _in_place(written, overwritten, metas, inputs, shapes, run)
    flat, out_spec = pytree.tree_flatten(shapes)
    outputs = [_place(shape, metas, inputs, device) for shape in flat]
    fresh = [output for output, shape in zip(outputs, flat, strict=True) if _is_new(shape, metas)]
    positions = [i for i, shape in enumerate(flat) if _is_new(shape, metas)]
    if fresh:
        values.compute(fresh, inputs, lambda *hosts: [pytree.tree_leaves(run(hosts, "cpu"))[i] for i in positions])
    return pytree.tree_unflatten(outputs, out_spec)


class _Device:
    """Stands for a device tensor in a call: a computation that nobody asks for must not keep its memory."""


_DEVICE = _Device()


class _Call:
    """A call whose device tensors are to be replaced by meta or host tensors."""

    def __init__(self, op: Any, leaves: list[Any], spec: Any) -> None:
        self._op = op
        self._leaves = [_DEVICE if is_simulated(leaf) else leaf for leaf in leaves]
        self._spec = spec

    def __call__(self, tensors: Any, where: str) -> Any:
        replacements = iter(tensors)
        lowered = [next(replacements) if leaf is _DEVICE else _on(leaf, where) for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(lowered, self._spec)
        return self._op(*args, **kwargs)


def _on(leaf: Any, where: str) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device(where)
    if where == "meta" and isinstance(leaf, torch.Tensor) and leaf.dim():
        return leaf.to(where)
    return leaf


def _device_argument(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if argument.name == "device" and value is not None:
            return torch.device(value)
    return None


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The simulated tensors that the operator writes to, by its schema; those of them that it does not read."""
    written: list[torch.Tensor] = []
    overwritten: list[torch.Tensor] = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            targets = [leaf for leaf in pytree.tree_leaves(value) if is_simulated(leaf)]
            written.extend(targets)
            if argument.is_out:
                overwritten.extend(targets)
    return written, overwritten


def _in_place(
    written: list[torch.Tensor],
    overwritten: list[torch.Tensor],
    metas: list[torch.Tensor],
    inputs: list[torch.Tensor],
    shapes: Any,
    run: Any,
) -> Any:
    positions = [_position(inputs, target, is_out=_is_in(overwritten, target)) for target in written]
    outs = {position for position, target in zip(positions, written, strict=True) if _is_in(overwritten, target)}
    for target, position in zip(written, positions, strict=True):
        if target.shape != metas[position].shape:  # an out= argument that the operator resized
            target.resize_(metas[position].shape)
    read = [tensor for position, tensor in enumerate(inputs) if position not in outs]
    shapes_and_dtypes = [(tensor.shape, tensor.dtype) for tensor in inputs]

    def compute(*hosts: torch.Tensor) -> list[torch.Tensor]:
        sources = iter(hosts)
        copies = [
            torch.empty(shape, dtype=dtype, device="cpu") if position in outs else next(sources)
            for position, (shape, dtype) in enumerate(shapes_and_dtypes)
        ]
        for position in positions:
            if position not in outs:
                copies[position] = copies[position].clone()
        run(copies, "cpu")
        return [copies[position] for position in positions]

    platform().values.update(written, read, compute)

    def original(shape: Any) -> Any:
        return next((t for t, meta in zip(inputs, metas, strict=True) if meta is shape), shape)

    return pytree.tree_map_only(torch.Tensor, original, shapes)


def _is_in(tensors: list[torch.Tensor], wanted: torch.Tensor) -> bool:
    return any(tensor is wanted for tensor in tensors)


def _position(tensors: list[torch.Tensor], wanted: torch.Tensor, *, is_out: bool) -> int:
    """Where in the call a tensor is written: ``out=`` comes last, and may be an input as well."""
    places = [position for position, tensor in enumerate(tensors) if tensor is wanted]
    return places[-1 if is_out else 0]


def _is_new(shape: Any, metas: list[torch.Tensor]) -> bool:
    return isinstance(shape, torch.Tensor) and all(
        shape.untyped_storage()._cdata != m.untyped_storage()._cdata for m in metas
    )


def _place(shape: Any, metas: list[torch.Tensor], inputs: list[torch.Tensor], device: torch.device) -> Any:
    """The device tensor for one result of the meta run: a view of an input, or a new one."""
    if not isinstance(shape, torch.Tensor):
        return shape
    for meta, tensor in zip(metas, inputs, strict=True):
        if shape.untyped_storage()._cdata == meta.untyped_storage()._cdata:
            offset = tensor.storage_offset() + shape.storage_offset() - meta.storage_offset()
            return _as_strided.redispatch(CPU_KEYS, tensor, tuple(shape.size()), shape.stride(), offset)
    size, stride = tuple(shape.size()), shape.stride()
    if stride == contiguous_stride(size):
        return new_on(runtime_of(device), size, shape.dtype)
    return empty_strided(size, stride, shape.dtype, device=device)


def _upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = new_on(runtime_of(device), host.shape, host.dtype)
    if host.numel():
        platform().values.write(tensor, host)
    return tensor
