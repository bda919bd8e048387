"""Operators that compute and communicate in one kernel (MC2): expert dispatch and combine, products with a collective.

They use the communicator whose name they are given, and wait for its other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.hccl.ranks import Arrival
from npusim.ops.hccl_rules import check_wait
from npusim.ops.operator import operator
from npusim.ops.parts import Part, update
from npusim.ops.refusal import refusal, type_name
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like

_ASSIST_WORDS = 128
"""int32 words for each received row in what ``combine_v2`` gets back from ``dispatch_v2``."""


def meet(
    group_name: str,
    rank: int,
    num_ranks: int,
    operation: str,
    finish: Callable[[list[Part], Sequence[int]], None],
    inputs: Sequence[Tensor | None] = (),
    outputs: Sequence[Tensor] = (),
    extra: Any = None,
) -> None:
    """Take the communicator's MC2 memory, wait for its other ranks, and let the last one ``finish`` with all parts.

    What the current stream gets next starts when the last rank is ready.

    Raises:
        CollectiveMismatchError: A rank does something else, or never comes.
        RuntimeError: A rank came too late for ``HCCL_EXEC_TIMEOUT``.
    """
    active = platform()
    active.hccl_communicator(group_name).operate_mc2()
    ranks = active.ranks
    slot = "mc2", ranks.current, group_name
    number = ranks.attached[slot] = ranks.attached.get(slot, 0) + 1
    runtime = active.runtimes[active.current_device()]
    streams, stream = runtime.card.streams, runtime.current_stream()
    arrival = Arrival(streams.ready_ns(stream))

    def finish_together(parts: list[Part], receivers: Sequence[int]) -> None:
        Arrival.join([part.arrival for part in parts])
        finish(parts, receivers)

    own = Part(inputs, outputs, extra, arrival)
    ranks.meet(("mc2", group_name, number), rank, num_ranks, operation, own, finish_together)
    check_wait(runtime, arrival)
    streams.enqueue(stream, 0, not_before_ns=arrival.time_ns)


# ---- dispatch


def _shares(
    x: Tensor,
    expert_ids: Tensor,
    ep_world_size: int,
    moe_expert_num: int,
    *,
    is_shared_rank: bool,
    shared_rows: int,
    num_shared_ranks: int,
    global_bs: int,
) -> tuple[int, int]:
    """This rank's experts, and the rows that it has room for: all that could arrive."""
    if is_shared_rank:
        return 1, shared_rows
    num_experts = moe_expert_num // (ep_world_size - num_shared_ranks)
    return num_experts, (global_bs or x.shape[0] * ep_world_size) * min(num_experts, expert_ids.shape[1])


def _place(
    ids: Sequence[Tensor], masks: Sequence[Tensor | None], num_experts: int, receiver: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank receives, by its experts and then by sender.

    Returns the sender and the entry (token * k + choice) of each row, and the number of rows per expert and sender.
    """
    num_senders = len(ids)
    experts = torch.cat([chosen.flatten() for chosen in ids]).long() - receiver * num_experts
    senders = torch.cat([torch.full((chosen.numel(),), sender) for sender, chosen in enumerate(ids)])
    entries = torch.cat([torch.arange(chosen.numel()) for chosen in ids])
    active = torch.cat(
        [
            torch.ones(chosen.numel(), dtype=torch.bool)
            if mask is None
            else mask.view(len(chosen), -1).expand_as(chosen).flatten()
            for chosen, mask in zip(ids, masks, strict=True)
        ]
    )
    arrives = active & (experts >= 0) & (experts < num_experts)
    groups = experts[arrives] * num_senders + senders[arrives]
    order = groups.argsort(stable=True)
    rows = torch.bincount(groups, minlength=num_experts * num_senders).view(num_experts, num_senders)
    return senders[arrives][order], entries[arrives][order], rows


def _exchange_tokens(group_name: str, rank: int, num_ranks: int, payload: dict[str, Any]) -> None:
    num_experts, counts_type = payload["num_experts"], payload["counts_type"]
    num_choices = payload["ids"].shape[1]
    own_inputs = [payload["x"], payload["ids"], *([] if payload["mask"] is None else [payload["mask"]])]
    own_outputs = [payload["counts"], payload["received"], payload["assist"], payload["expand_x"]]

    def finish(parts: list[Part], receivers: Sequence[int]) -> None:
        masked = [len(part.inputs) > 2 for part in parts]
        xs, ids = ([part.inputs[index] for part in parts] for index in range(2))
        masks = [mask for part in parts for mask in part.inputs[2:]]
        receiving = [parts[receiver].outputs for receiver in receivers]
        # What is computed later must hold no tensors of these.
        sizes = [(len(expand_x), len(assist)) for _, _, assist, expand_x in receiving]

        def places(hosts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
            given = iter(hosts[num_ranks:])
            host_masks = [next(given) if has else None for has in masked]
            return [_place(hosts[:num_ranks], host_masks, num_experts, receiver) for receiver in receivers]

        def counts(*hosts: Tensor) -> list[Tensor]:
            results = []
            for (_, num_words), (senders, entries, rows) in zip(sizes, places(hosts), strict=True):
                tokens = rows.sum(1)
                triples = torch.stack((senders, entries // num_choices, entries % num_choices), dim=1)
                assist = torch.zeros(num_words, dtype=torch.int32)
                assist[: len(triples) * _ASSIST_WORDS].view(-1, _ASSIST_WORDS)[:, :3] = triples
                results += [tokens if counts_type else tokens.cumsum(0), rows.flatten().cumsum(0).int(), assist]
            return results

        def rows(*hosts: Tensor) -> list[Tensor]:
            xs = hosts[:num_ranks]
            starts = torch.tensor([0, *(len(x) for x in xs)]).cumsum(0)
            tokens = torch.cat(xs)
            results = []
            for (num_rows, _), (senders, entries, _) in zip(sizes, places(hosts[num_ranks:]), strict=True):
                result = torch.zeros(num_rows, tokens.shape[1], dtype=tokens.dtype)
                result[: len(entries)] = tokens[starts[senders] + entries // num_choices]
                results.append(result)
            return results

        update([tensor for outputs in receiving for tensor in outputs[:3]], [*ids, *masks], counts)
        update([outputs[3] for outputs in receiving], [*xs, *ids, *masks], rows)

    meet(group_name, rank, num_ranks, "moe_distribute_dispatch", finish, own_inputs, own_outputs)


def _check_shared(num_shared: int, num_shared_ranks: int, ep_world_size: int, ep_rank_id: int) -> None:
    sizes = f"ep_world_size: {ep_world_size}"
    if not 0 <= ep_rank_id < ep_world_size:
        raise refusal(f"ep_rank_id should be in [0, ep_world_size), but got {sizes}, ep_rank_id: {ep_rank_id}. ")
    if not 0 <= num_shared_ranks < ep_world_size:
        raise refusal(
            f"shared_expert_rank_num should be in [0, ep_world_size), but got {sizes}, shared_expert_rank_num: "
            f"{num_shared_ranks}. "
        )
    none = num_shared_ranks == 0 and num_shared in (0, 1)
    if not (none or (num_shared > 0 and num_shared_ranks // num_shared > 0 and num_shared_ranks % num_shared == 0)):
        raise refusal(
            "shared_expert_num and shared_expertrank_num have obvious value situations: 1. shared_expert_num is 1, "
            "shared_expert_rank_num is 0; 2. shared_expert num is 0, shared_expert_rank_num is 0; 3. "
            "shared_expert_num in (0, shared_expert_rank_num] and shared_expert_rank_num % shared_expert_num = 0. but "
            f"the current input value is  shared_expert_num: {num_shared}, shared_expert_rank_num: {num_shared_ranks}. "
        )


@operator("npu::npu_moe_distribute_dispatch_v2")
def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    elastic_info: Tensor | None = None,
    tp_world_size: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    y_dtype: int | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    """Sends each token to its experts' ranks. Results have room for all that could arrive: all ranks' tokens."""
    if x.dim() != 2 or expert_ids.dim() != 2:
        raise refusal("The x and expert_ids should be 2D")
    _check_shared(shared_expert_num, shared_expert_rank_num, ep_world_size, ep_rank_id)
    if expert_token_nums_type not in (0, 1):
        raise refusal("The expert_token_nums_type should be 0 or 1.")
    if elastic_info is not None or y_dtype is not None or quant_mode not in (0, 1, 2):
        raise UnmodelledCallError(
            "npu_moe_distribute_dispatch_v2 with elastic_info, y_dtype or quant_mode > 2 is not modelled"
        )
    is_shared_rank = expert_shard_type == 0 and ep_rank_id < shared_expert_rank_num
    global_rows = global_bs or x.shape[0] * ep_world_size
    shared_rows = 0
    if is_shared_rank:
        ranks_per_shared = shared_expert_rank_num // shared_expert_num
        shared_rows = global_rows // ep_world_size * -(-ep_world_size // ranks_per_shared)
    num_experts, num_rows = _shares(
        x,
        expert_ids,
        ep_world_size,
        moe_expert_num,
        is_shared_rank=is_shared_rank,
        shared_rows=shared_rows,
        num_shared_ranks=shared_expert_rank_num,
        global_bs=global_bs,
    )
    num_choices = expert_ids.shape[1]
    num_counts = ep_world_size * num_experts * (2 if tp_world_size == 2 else 1)
    expand_x = new_like(
        x, (max(num_rows, num_rows * tp_world_size), x.shape[1]), x.dtype if quant_mode == 0 else torch.int8
    )
    dynamic_scales = new_like(x, (num_rows * (tp_world_size or 1),), torch.float32)
    counts = new_like(x, (num_experts,), torch.int64)
    received = new_like(x, (num_counts,), torch.int32)
    tp_received = new_like(x, (tp_world_size,), torch.int32)
    assist = new_like(x, (max(x.shape[0] * num_choices, num_rows * _ASSIST_WORDS),), torch.int32)
    expand_scales = new_like(x, (num_rows,), torch.float32)
    if expert_scales is not None:
        received = new_like(
            x, (ep_world_size * num_experts + 2 * global_rows * num_choices * (ep_world_size // 8),), torch.int32
        )
    payload = {
        "x": x,
        "ids": expert_ids,
        "mask": x_active_mask,
        "num_experts": num_experts,
        "counts_type": expert_token_nums_type,
        "counts": counts,
        "received": received[:num_counts],
        "assist": assist,
        "expand_x": expand_x,
    }
    if shared_expert_rank_num or quant_mode or tp_world_size > 1:
        meet(group_ep, ep_rank_id, ep_world_size, "moe_distribute_dispatch", _nothing)
    else:
        _exchange_tokens(group_ep, ep_rank_id, ep_world_size, payload)
    return expand_x, dynamic_scales, assist, counts, received, tp_received, expand_scales


def _nothing(parts: list[Part], receivers: Sequence[int]) -> None:
    """Only shapes are modelled."""


@operator("npu::npu_moe_distribute_dispatch")
def npu_moe_distribute_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    expert_scales: Tensor | None = None,
    tp_world_size: int = 0,
    expert_shard_type: int = 0,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    **_: Any,
) -> tuple[Tensor, ...]:
    """The older form, which gives back the place of each entry; modelled by its shapes."""
    if x.dim() != 2 or expert_ids.dim() != 2:
        raise refusal("The x and expert_ids should be 2D")
    if x.dtype not in (torch.bfloat16, torch.float16) or expert_ids.dtype is not torch.int32:
        raise refusal("dtype of x should be bfloat16 or half, dtype of expert_ids should be int.")
    if not 0 <= shared_expert_rank_num < ep_world_size:
        raise refusal("shared_expert_rank_num should be in [0, ep_world_size)")
    if expert_token_nums_type not in (0, 1):
        raise refusal("The expert_token_nums_type should be 0 or 1.")
    if expert_shard_type == 0:
        is_shared_rank = ep_rank_id < shared_expert_rank_num
    else:
        is_shared_rank = ep_rank_id >= ep_world_size - shared_expert_rank_num
    global_rows = global_bs or x.shape[0] * ep_world_size
    num_experts, num_rows = _shares(
        x,
        expert_ids,
        ep_world_size,
        moe_expert_num,
        is_shared_rank=is_shared_rank,
        shared_rows=global_rows // shared_expert_rank_num if is_shared_rank else 0,
        num_shared_ranks=shared_expert_rank_num,
        global_bs=global_bs,
    )
    num_choices = expert_ids.shape[1]
    dtype = x.dtype if scales is None and quant_mode == 0 else torch.int8
    factor = tp_world_size or 1
    expand_x = new_like(x, (num_rows * factor, x.shape[1]), dtype)
    dynamic_scales = new_like(x, (num_rows * factor,), torch.float32)
    expand_idx = new_like(x, (x.shape[0] * num_choices,), torch.int32)
    counts = new_like(x, (num_experts,), torch.int64)
    received = new_like(x, (ep_world_size * num_experts * (2 if tp_world_size == 2 else 1),), torch.int32)
    tp_received = new_like(x, (tp_world_size,), torch.int32)
    expand_scales = new_like(x, (num_rows,), torch.float32)
    if expert_scales is not None:
        received = new_like(
            x, (ep_world_size * num_experts + 2 * global_rows * num_choices * (ep_world_size // 8),), torch.int32
        )
    meet(group_ep, ep_rank_id, ep_world_size, "moe_distribute_dispatch", _nothing)
    return expand_x, dynamic_scales, expand_idx, counts, received, tp_received, expand_scales


# ---- combine


def _return_tokens(group_name: str, rank: int, num_ranks: int, payload: dict[str, Tensor]) -> None:
    output, dtype = payload["output"], payload["output"].dtype
    inputs = [payload[name] for name in ("x", "assist", "counts", "scales")]
    # Nothing follows from some of them, and large ones need not be sent.
    own_inputs = inputs if platform().values.known(inputs) else [None] * len(inputs)

    def finish(parts: list[Part], receivers: Sequence[int]) -> None:
        sizes = [part.extra for part in parts]

        def combine(*hosts: Tensor) -> list[Tensor]:
            xs, assists, counts, scales = (hosts[i * num_ranks : (i + 1) * num_ranks] for i in range(len(inputs)))
            totals = [torch.zeros(size) for size in sizes]
            for x, assist, count in zip(xs, assists, counts, strict=True):
                num_rows = int(count.max()) if len(count) else 0
                triples = assist[: num_rows * _ASSIST_WORDS].view(num_rows, _ASSIST_WORDS)[:, :3].tolist()
                for row, (sender, token, choice) in enumerate(triples):
                    totals[sender][token] += x[row].float() * scales[sender][token, choice]
            return [totals[receiver].to(dtype) for receiver in receivers]

        targets = [parts[receiver].outputs[0] for receiver in receivers]
        update(targets, [part.inputs[index] for index in range(len(inputs)) for part in parts], combine)

    meet(group_name, rank, num_ranks, "moe_distribute_combine", finish, own_inputs, [output], tuple(output.shape))


@operator("npu::npu_moe_distribute_combine_v2")
def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    shared_expert_x: Tensor | None = None,
    shared_expert_rank_num: int = 0,
    tp_world_size: int = 0,
    **_: Any,
) -> Tensor:
    """Sends rows back; each token's sum, weighted."""
    if expand_x.dim() != 2 or expert_ids.dim() != 2:
        raise refusal("The x and expert_ids should be 2D")
    if expand_x.dtype not in (torch.bfloat16, torch.float16, torch.int32):
        raise refusal(f"dtype of expand_x should be BFloat16, Float16 or Int, but got {type_name(expand_x.dtype)}")
    if expert_ids.dtype is not torch.int32:
        raise refusal(f"dtype of expert_ids should be Int, but got {type_name(expert_ids.dtype)}")
    dtype = torch.bfloat16 if expand_x.dtype is torch.int32 else expand_x.dtype
    output = new_like(expert_ids, (expert_ids.shape[0], expand_x.shape[1]), dtype)
    if shared_expert_rank_num or shared_expert_x is not None or tp_world_size > 1:
        meet(group_ep, ep_rank_id, ep_world_size, "moe_distribute_combine", _nothing)
    else:
        num_counts = moe_expert_num
        payload = {
            "x": expand_x,
            "assist": assist_info_for_combine,
            "counts": ep_send_counts[:num_counts],
            "scales": expert_scales,
            "output": output,
        }
        _return_tokens(group_ep, ep_rank_id, ep_world_size, payload)
    return output


@operator("npu::npu_moe_distribute_combine")
def npu_moe_distribute_combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **_: Any,
) -> Tensor:
    """The older form; modelled by its shapes."""
    _check_combine(expand_x, expert_ids)
    dtype = torch.bfloat16 if expand_x.dtype is torch.int32 else expand_x.dtype
    output = new_like(expert_ids, (expert_ids.shape[0], expand_x.shape[1]), dtype)
    meet(group_ep, ep_rank_id, ep_world_size, "moe_distribute_combine", _nothing)
    return output


def _check_combine(expand_x: Tensor, expert_ids: Tensor) -> None:
    if expand_x.dim() != 2 or expert_ids.dim() != 2:
        raise refusal("The x and expert_ids should be 2D")
    types = (torch.bfloat16, torch.float16, torch.int32)
    if expand_x.dtype not in types or expert_ids.dtype is not torch.int32:
        raise refusal("dtype of x should be bfloat16, float16 or int, dtype of expert_ids should be int.")


@operator("npu::npu_moe_distribute_combine_add_rms_norm")
def npu_moe_distribute_combine_add_rms_norm(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    residual_x: Tensor,
    gamma: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine, residual sum and norm; modelled by its shapes."""
    _check_combine(expand_x, expert_ids)
    rows, width = expert_ids.shape[0], expand_x.shape[1]
    dtype = torch.bfloat16 if expand_x.dtype is torch.int32 else expand_x.dtype
    y = new_like(expert_ids, (rows, 1, width), dtype)
    rstd = new_like(expert_ids, (rows, 1, 1), torch.float32)
    total = new_like(expert_ids, (rows, 1, width), dtype)
    meet(group_ep, ep_rank_id, ep_world_size, "moe_distribute_combine_add_rms_norm", _nothing)
    return y, rstd, total
