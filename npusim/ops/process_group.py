"""The process group of simulated ranks: torch.distributed's collectives, as torch_npu makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from npusim.errors import UnmodelledCallError
from npusim.ops.hccl_rules import (
    INVALID_PARAMETER,
    INVALID_TYPE,
    REDUCED_AS_INT32,
    padded,
    padding_of,
    reduced,
    reduction,
)
from npusim.ops.rank_group import Parts, RankGroup
from npusim.ops.refusal import refusal
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like, new_on


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # not in the stub


def _size(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {tensor.dtype}"


class SimulatedProcessGroup(RankGroup):
    """``ProcessGroupHCCL``, or gloo's for host tensors: each collective's checks, tensors and result."""

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Sum (or other reduction) over ranks, in place."""
        self._reduce(tensors[0], self._reduction(opts.reduceOp, tensors, "allreduce"), None)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        """:meth:`allreduce` for each of several tensors."""
        for tensor in tensors:
            self.allreduce([tensor], opts)
        return _done(tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Sum (or other reduction) over ranks, in place at the root."""
        self._reduce(tensors[0], self._reduction(opts.reduceOp, tensors, "reduce"), opts.rootRank)
        return _done(tensors)

    def _reduce(self, tensor: Tensor, name: str, root: int | None) -> None:
        """Some types as int32 copies, which the communicator's stream uses (exact: golden records)."""
        as_copy = tensor.device.type == "npu" and tensor.dtype in REDUCED_AS_INT32
        summand = tensor.to(torch.int32) if as_copy else tensor
        outputs = [summand] if root in (None, self._group_rank) else []

        def combine(parts: Parts, receivers: Sequence[int]) -> list[Tensor]:
            total = reduced(name, [part[0] for part in parts])
            return [total for receiver in receivers if root in (None, receiver)]

        call, where = ("allreduce", "") if root is None else ("reduce", f" at {root}")
        self._collective(call, f"{name} of {_size(summand)}{where}", [summand], outputs, combine)
        if as_copy:
            tensor.copy_(summand)
            record = platform().storages.of(summand)
            record.device.tensor_memory.record_stream(record.address, self._handle(record.device))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """The root's tensor, in place.

        Raises:
            UnmodelledCallError: The root is a rank that this world does not have, and the tensor is on the host, where
                what it gets is read: sizes of objects, for example.
        """
        (tensor,), root = tensors, opts.rootRank
        if self._ranks.is_lone and root != self._group_rank and tensor.device.type == "cpu":
            raise UnmodelledCallError(
                f"this world has only rank {self._group_rank} of group {self._label!r}: what rank {root} broadcasts "
                "from its host is not known"
            )

        def combine(parts: Parts, receivers: Sequence[int]) -> list[Tensor]:
            return [parts[root][0]] * len(receivers)

        self._collective("broadcast", f"{_size(tensor)} from {root}", tensors, tensors, combine, senders=[root])
        return _done(tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """All ranks' inputs, one after another."""
        del opts
        if output.dtype != input.dtype:
            raise refusal("output tensor must have the same type as input tensor", INVALID_PARAMETER)
        if output.numel() != input.numel() * self.size():
            raise refusal("output tensor size must be equal to world_size times input tensor size", INVALID_PARAMETER)

        def combine(parts: Parts, receivers: Sequence[int]) -> list[Tensor]:
            return [torch.cat([part[0].flatten() for part in parts])] * len(receivers)

        self._collective("allgather_base", _size(input), [input], [output], combine)
        return _done(output)

    def allgather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """All ranks' inputs in a list: through one flat tensor, which is then copied out (exact: golden records)."""
        del opts
        (outputs,), (part,) = output_lists, inputs
        self._check([part, *outputs])
        if len(outputs) != self.size():
            text = "Tensor list input to scatter/gather must match number of collective participants"
            raise refusal(text, INVALID_PARAMETER)
        if part.device.type == "npu":
            self._gather_flat(outputs, part)
            return _done(output_lists)

        def combine(parts: Parts, receivers: Sequence[int]) -> list[Tensor]:
            return [part[0] for part in parts] * len(receivers)

        self._collective("allgather", str(part.dtype), inputs, outputs, combine)
        return _done(output_lists)

    def _gather_flat(self, outputs: Sequence[Tensor], part: Tensor) -> None:
        counts = [output.numel() for output in outputs]
        padding = padding_of(part) if len(set(counts)) == 1 else 0
        held = [padded(tensor, padding) for tensor in (*outputs, part)] if padding else []
        flat = new_like(part, (sum(counts) + len(counts) * padding,))
        del held

        def combine(parts: Parts, receivers: Sequence[int]) -> list[Tensor]:
            rows = [functional.pad(part[0].flatten(), (0, padding)) for part in parts]
            return [torch.cat(rows)] * len(receivers)

        self._collective("allgather", str(part.dtype), [part], [flat], combine)
        shares = flat.split([count + padding for count in counts])
        for output, share, count in zip(outputs, shares, counts, strict=True):
            output.copy_(share[:count].view(output.shape))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        """Each rank's share of the sum over ranks."""
        self._check([input, output])
        if input.dtype != output.dtype:
            raise refusal("input tensor must be the same type as the output tensor.", INVALID_TYPE)
        if input.numel() != output.numel() * self.size():
            text = "input tensor must be the same size as output size times world size"
            raise refusal(text, INVALID_PARAMETER)
        name = self._reduction(opts.reduceOp, [input], "_reduce_scatter_base")

        def combine(parts: Parts, receivers: Sequence[int]) -> list[Tensor]:
            shares = reduced(name, [part[0].flatten() for part in parts]).chunk(len(parts))
            return [shares[receiver] for receiver in receivers]

        self._collective("reduce_scatter", f"{name} of {_size(input)}", [input], [output], combine)
        return _done(output)

    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> Any:
        """The sum over ranks of what each has for this rank; through one flat tensor (exact: torch_npu 2.13.0)."""
        (output,), (inputs,) = outputs, input_lists
        name = self._reduction(opts.reduceOp, inputs, "reduce_scatter")
        flat = self._flat(inputs)

        def combine(parts: Parts, receivers: Sequence[int]) -> list[Tensor]:
            return [reduced(name, [part[receiver] for part in parts]) for receiver in receivers]

        self._collective("reduce_scatter", f"{name}, lists of {output.dtype}", inputs, outputs, combine)
        del flat
        return _done(outputs)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Any:
        """Rows to every rank, rows from every rank; even shares unless split sizes are given."""
        del opts
        sends, receives = self._splits(input_splits, input), self._splits(output_splits, output)

        def combine(parts: Parts, receivers: Sequence[int]) -> list[Tensor]:
            shares = [part[0].split(splits) for part, splits in zip(parts, all_sends, strict=True)]
            return [torch.cat([share[receiver] for share in shares]) for receiver in receivers]

        all_sends: list[list[int]] = []

        def check(splits: Sequence[tuple[list[int], list[int]]], receivers: Sequence[int]) -> None:
            all_sends.extend(sends for sends, _ in splits)
            for receiver in receivers:
                offered, expected = [sends[receiver] for sends in all_sends], splits[receiver][1]
                if offered != expected and not self._ranks.is_lone:
                    raise RuntimeError(
                        f"rank {receiver} expects {expected} rows of all_to_all on {self._label}, gets {offered}"
                    )

        self._collective("alltoall_base", str(input.dtype), [input], [output], combine, (sends, receives), check)
        return _done(output)

    all_to_all_single = alltoall_base
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """A tensor to every rank, a tensor from every rank; through two flat tensors (exact: torch_npu 2.13.0)."""
        del opts
        self._check([*inputs, *outputs])
        flat = self._flat(inputs), self._flat(outputs)

        def combine(parts: Parts, receivers: Sequence[int]) -> list[Tensor]:
            return [part[receiver] for receiver in receivers for part in parts]

        self._collective("alltoall", str(inputs[0].dtype), inputs, outputs, combine)
        del flat
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks; takes a byte and a word on the device meanwhile (exact: golden records)."""
        del opts
        if "npu" in self._taken:
            active = platform()
            runtime = active.runtimes[active.current_device()]
            held = [new_on(runtime, (1,), torch.uint8), new_on(runtime, (1,), torch.float32)]
            self._collective("barrier", "", held[1:], [], lambda parts, receivers: [])
            runtime.synchronize_device()
        else:
            self._collective("barrier", "", [], [], lambda parts, receivers: [])
        return _done(None)

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Device memory for tensors that go through one, in front of the collective or behind it."""
        if tensors[0].device.type != "npu":
            return None
        return new_like(tensors[0], (sum(tensor.numel() for tensor in tensors),))

    def _splits(self, given: Sequence[int], tensor: Tensor) -> list[int]:
        num_rows, size = tensor.shape[0] if tensor.dim() else 0, self.size()
        splits = [int(rows) for rows in given] or [num_rows // size] * size  # given in a list, or in an array of NumPy
        if not len(given) and num_rows % size:
            raise refusal("Tensor's dim 0 does not divide equally across group size", INVALID_PARAMETER)
        if sum(splits) != num_rows:
            raise refusal("Split sizes doesn't match total dim 0 size", INVALID_TYPE)
        return splits

    def _reduction(self, op: Any, tensors: Sequence[Tensor], call: str) -> str:
        self._check(tensors)
        return reduction(op, tensors[0], call)


def _unmodelled(name: str) -> Callable[..., NoReturn]:
    def refuse(self: SimulatedProcessGroup, *args: Any, **kwargs: Any) -> NoReturn:
        del self, args, kwargs
        raise UnmodelledCallError(f"ProcessGroupHCCL.{name} is not modelled on the simulated device")

    return refuse


for _name in (  # torch_npu makes gather and scatter of other collectives, with objects sent first
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "merge_remote_group",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "split_group",
):
    setattr(SimulatedProcessGroup, _name, _unmodelled(_name))
