"""What an ``aten`` operator without a kernel of its own does: shapes by torch's meta kernels, values by its CPU ones.

Grade: assumed where torch_npu would allocate temporaries, too; those operators get kernels of their own in
``npusim.ops``.
"""

from __future__ import annotations

from typing import Any, Never

import torch
from torch.utils import _pytree as pytree

from npusim.errors import UnmodelledCallError
from npusim.torch_backend.factories import empty_strided
from npusim.torch_backend.registration import kernel, platform
from npusim.torch_backend.shells import CPU_KEYS
from npusim.torch_backend.storage import contiguous_stride, offset_of
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


UNMODELLED = ("_conj", "_neg_view", "conj_physical_", "convolution_overrideable")
"""Operators that torch would run without asking the fallback, and wrongly: the two views are marks on a tensor."""
_TENSOR_TYPES = frozenset({"Tensor", "Optional[Tensor]"})


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same geometry."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _name(op: Any) -> str:
    overload = op._overloadname
    name: str = op._schema.name
    return name if overload in ("", "default") else f"{name}.{overload}"


def _unmodelled(name: str) -> UnmodelledCallError:
    return UnmodelledCallError(f"operator {name} is not modelled on the simulated device")


def _refuse(name: str) -> None:
    def refusal(*_: Any, **__: Any) -> Never:
        raise _unmodelled(f"aten::{name}")

    kernel("aten", name)(refusal)


for _unmodelled_name in UNMODELLED:
    _refuse(_unmodelled_name)


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on simulated tensors.

    Raises:
        UnmodelledCallError: It is not one of torch's own operators, or one whose shapes torch cannot tell.
    """
    name = _name(op)
    if op.namespace != "aten":
        raise _unmodelled(name)
    args, kwargs = _with_tensors(op, args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    inputs = [leaf for leaf in leaves if is_simulated(leaf)]
    device = (
        inputs[0].device if inputs else torch.device("npu", runtime_of(_device_argument(op, args, kwargs)).card.index)
    )

    run = _Call(name, op, leaves, spec)
    values = platform().values
    if name in SHAPE_FOLLOWS_VALUES:
        results = run([values.read(tensor) for tensor in inputs], "cpu")
        _launch(name, device, sum(tensor.nbytes for tensor in inputs), waits=True)
        return pytree.tree_map_only(torch.Tensor, lambda host: _upload(host, device), results)
    metas = [stand_in(tensor) for tensor in inputs]
    try:
        shapes, out_spec = pytree.tree_flatten(run(metas, "meta"))
    except NotImplementedError:
        raise _unmodelled(name) from None

    written, overwritten = _written(op, args, kwargs)
    outs = {_last_position(inputs, target) for target in overwritten}
    places = [*outs, *(_first_position(inputs, target) for target in written if not _is_in(overwritten, target))]
    for place in places:
        if inputs[place].shape != metas[place].shape:  # an out= argument that the operator resized
            inputs[place].resize_(metas[place].shape)
    outputs = [_place(shape, metas, inputs, places, device) for shape in shapes]
    fresh = [position for position, shape in enumerate(shapes) if _is_new(shape, metas)]
    targets = [*(inputs[place] for place in places), *(outputs[position] for position in fresh)]
    results = _Results(run, inputs, outs, places, fresh, [target.shape for target in targets])
    read = [tensor for place, tensor in enumerate(inputs) if place not in outs]
    if targets:
        num_bytes = 0
        for tensor in (*read, *targets):
            num_bytes += tensor.nbytes
        _launch(name, device, num_bytes)
    if places:
        values.update(targets, read, results)
    elif fresh:
        values.compute(targets, read, results)
    return pytree.tree_unflatten(outputs, out_spec)


def _launch(name: str, device: torch.device, num_bytes: int, *, waits: bool = False) -> None:
    """The operator was queued as one kernel that moves so many bytes; the host may have to wait for its results."""
    runtime = platform().runtimes[device.index]
    card, stream = runtime.card, runtime.current_stream()
    card.launch(name, stream, card.costs.vector_ns(num_bytes))
    if waits:
        card.streams.synchronize_stream(stream)


class _Device:
    """Stands for a device tensor in a call: a computation that nobody asks for must not keep its memory."""


_DEVICE = _Device()


class _Call:
    """A call whose device tensors are to be replaced by meta or host tensors."""

    def __init__(self, name: str, op: Any, leaves: list[Any], spec: Any) -> None:
        self.name = name
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


def _with_tensors(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Numbers that torch passed for tensors as tensors again, of the type that they would get."""
    arguments = op._schema.arguments
    others = next((value for value in args if is_simulated(value)), None)

    def restored(argument: Any, value: Any) -> Any:
        if not isinstance(value, (bool, int, float, complex)) or str(argument.type) not in _TENSOR_TYPES:
            return value
        dtype = torch.get_default_dtype() if others is None else torch.result_type(others, value)
        return torch.tensor(value, device="cpu").to(dtype)

    named = {argument.name: argument for argument in arguments if argument.kwarg_only}
    return (
        tuple(restored(argument, value) for argument, value in zip(arguments, args, strict=False)),
        {name: restored(named[name], value) if name in named else value for name, value in kwargs.items()},
    )


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


class _Results:
    """What is written by a call, computed on the host: first the inputs at ``places``, then the ``fresh`` results."""

    def __init__(
        self,
        run: _Call,
        inputs: list[torch.Tensor],
        outs: set[int],
        places: list[int],
        fresh: list[int],
        sizes: list[torch.Size],
    ) -> None:
        self._run = run
        self._unread = {place: (inputs[place].shape, inputs[place].dtype) for place in outs}
        self._num_inputs = len(inputs)
        self._places = places
        self._fresh = fresh
        self._sizes = sizes

    def __call__(self, *read: torch.Tensor) -> list[torch.Tensor]:
        sources = iter(read)
        hosts = []
        for place in range(self._num_inputs):
            if place in self._unread:
                size, dtype = self._unread[place]
                hosts.append(torch.empty(size, dtype=dtype, device="cpu"))
            else:
                host = next(sources)
                hosts.append(host.clone() if place in self._places else host)
        flat = pytree.tree_leaves(self._run(hosts, "cpu"))
        results = [*(hosts[place] for place in self._places), *(flat[position] for position in self._fresh)]
        for result, size in zip(results, self._sizes, strict=True):
            if result.shape != size:
                raise UnmodelledCallError(
                    f"{self._run.name} is not modelled on the simulated device for these arguments: torch's kernels "
                    f"give results of sizes {list(size)} by shapes and {list(result.shape)} by values"
                )
        return results


def _is_in(tensors: list[torch.Tensor], wanted: torch.Tensor) -> bool:
    return any(tensor is wanted for tensor in tensors)


def _first_position(tensors: list[torch.Tensor], wanted: torch.Tensor) -> int:
    return next(position for position, tensor in enumerate(tensors) if tensor is wanted)


def _last_position(tensors: list[torch.Tensor], wanted: torch.Tensor) -> int:
    """Where an ``out=`` tensor is: it comes last, and may be an input as well."""
    return len(tensors) - 1 - _first_position(tensors[::-1], wanted)


def _is_new(shape: Any, metas: list[torch.Tensor]) -> bool:
    return isinstance(shape, torch.Tensor) and all(
        shape.untyped_storage()._cdata != m.untyped_storage()._cdata for m in metas
    )


def _place(
    shape: Any, metas: list[torch.Tensor], inputs: list[torch.Tensor], written: list[int], device: torch.device
) -> Any:
    """The device tensor for one result of the meta run: a written input itself, a view of an input, or a new one."""
    if not isinstance(shape, torch.Tensor):
        return shape
    for place in written:
        if shape is metas[place]:
            return inputs[place]
    size, stride = tuple(shape.size()), shape.stride()
    for meta, tensor in zip(metas, inputs, strict=True):
        if shape.untyped_storage()._cdata == meta.untyped_storage()._cdata:
            if shape.dtype is tensor.dtype:
                offset = offset_of(tensor) + offset_of(shape)
                return _as_strided.redispatch(CPU_KEYS, tensor, size, stride, offset)
            skipped_bytes = offset_of(tensor) * tensor.dtype.itemsize
            offset = skipped_bytes // shape.dtype.itemsize + offset_of(shape)
            return platform().storages.tensor(tensor.untyped_storage(), shape.dtype, size, stride, offset)
    if stride == contiguous_stride(size):
        return new_on(runtime_of(device), size, shape.dtype)
    return empty_strided(size, stride, shape.dtype, device=device)


def _upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = new_on(runtime_of(device), host.shape, host.dtype)
    if host.numel():
        platform().values.write(tensor, host)
    return tensor
