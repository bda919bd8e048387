"""Collectives of the forward: what they take from the pool while they run.

XCCL copies between the pools of the ranks. A tensor that does not lie in the pool is staged through it.
"""

from __future__ import annotations

from npusim.xlite.forward_pass import ForwardPass
from npusim.xlite.rank_model import CommGroup
from npusim.xlite.tensors import Tensor


def all_gather(run: ForwardPass, source: Tensor, target: Tensor, group: CommGroup) -> None:
    """Gather ``source`` of every rank into ``target``.

    Raises:
        RuntimeError: xlite's own text, when the sizes do not match.
    """
    if source.numel * group.size != target.numel:
        source_name, target_name = (f"{tensor.dtype.name}({tensor.dtype.code})" for tensor in (source, target))
        raise RuntimeError(
            f"XliteOpAllGather: check tensor failed! in.dtype={source_name} out.dtype={target_name} "
            f"in.numel={source.numel} rankSize={group.size} expected out.numel={source.numel * group.size} "
            f"actual out.numel={target.numel}"
        )
    _stage(run, "XliteOpAllGather", group, source, target)


def reduce_scatter(run: ForwardPass, source: Tensor, target: Tensor, group: CommGroup) -> None:
    """Sum ``source`` over the ranks and leave each its part in ``target``."""
    _stage(run, "XliteOpReduceScatter", group, source, target)


def all_reduce(run: ForwardPass, tensor: Tensor, group: CommGroup) -> None:
    """Sum ``tensor`` over the ranks in place."""
    _stage(run, "XliteOpAllReduceSum", group, tensor)


def reduce_hidden(run: ForwardPass, hidden: Tensor) -> None:
    """Sum the hidden states over TP behind a row-parallel layer, in the way of this pass's path."""
    if run.splits_collectives:
        reduce_scatter(run, run.hidden_pad, run.hidden_slice, run.model.tp)
    else:
        all_reduce(run, hidden, run.model.tp)


def gather_hidden(run: ForwardPass) -> None:
    """Bring the slices of the hidden states together again, in the path that scattered them."""
    if run.splits_collectives:
        all_gather(run, run.hidden_slice, run.hidden_pad, run.model.tp)


def _stage(run: ForwardPass, function: str, group: CommGroup, *tensors: Tensor) -> None:
    if group.size == 1 or not group.uses_xccl or all(map(run.pool.holds, tensors)):
        return
    staged = [run.pool.get(tensor.shape, tensor.dtype, function) for tensor in tensors]
    for tensor in staged:
        run.put(tensor)
