"""Triton kernels of vendor code, as operators: by the kernel's full name, what it writes and how that is computed.

A kernel allocates nothing. Its arguments are those of its source, by name; pointers are tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.ops import triton_sampling as sampling
from npusim.ops.work import bytes_of
from npusim.torch_backend.registration import platform

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class TritonKernel:
    """A kernel that is modelled.

    Attributes:
        writes: Names of the arguments that it overwrites.
        computes: Their new values, from all arguments on the host.
    """

    writes: tuple[str, ...]
    computes: Callable[[Arguments], list[Tensor]]


def launch(name: str, arguments: Arguments) -> None:
    """Run a kernel on the device of its tensors.

    Args:
        name: Module and name of the kernel's source.
        arguments: What it was launched with, by parameter.

    Raises:
        UnmodelledCallError: Nobody modelled this kernel.
    """
    if name not in KERNELS:
        raise UnmodelledCallError(f"Triton kernel {name} is not modelled on the simulated device")
    kernel = KERNELS[name]
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    targets = [tensors[key] for key in kernel.writes if key in tensors]
    active = platform()
    runtime = active.runtimes[targets[0].device.index]
    duration_ns = runtime.card.costs.vector_ns(2 * bytes_of(targets))
    runtime.card.launch(f"triton::{name.rpartition('.')[2]}", runtime.current_stream(), duration_ns)
    others = {key: value for key, value in arguments.items() if key not in tensors}
    keys = list(tensors)

    def compute(*hosts: Tensor) -> list[Tensor]:
        return kernel.computes({**others, **dict(zip(keys, hosts, strict=True))})

    active.values.update(targets, list(tensors.values()), compute)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, rope_dim: int, *, is_neox: bool) -> Tensor:
    """``x`` [tokens, heads, size] with its first ``rope_dim`` elements rotated, in float32."""
    rope, rest = x[..., :rope_dim].float(), x[..., rope_dim:]
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    first, second = rope.chunk(2, -1) if is_neox else (rope[..., ::2], rope[..., 1::2])
    parts = first * cos - second * sin, second * cos + first * sin
    rotated = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)
    return torch.cat((rotated.to(x.dtype), rest), -1)


def _rope(arguments: Arguments) -> list[Tensor]:
    rope_dim = arguments["rope_dim"]
    if arguments["USE_COS_SIN"]:
        cos, sin = arguments["cos_sin_ptr"][arguments["pos_ptr"].long()].chunk(2, -1)
    else:
        cos, sin = arguments["cos_ptr"], arguments["sin_ptr"]
    half = rope_dim // 2
    return [
        _rotated(arguments[name], cos[..., :half], sin[..., :half], rope_dim, is_neox=arguments["IS_NEOX_STYLE"])
        for name in ("q_ptr", "k_ptr")
    ]


_DRAFTING_WRITES = ("token_indices_to_sample_ptr", "num_rejected_tokens_gpu_ptr")


def _prepare_drafting(arguments: Arguments) -> list[Tensor]:
    """Each request's last token that counts, and how many behind it are rejected drafts."""
    num_reqs = arguments["num_reqs"]
    cumulated = arguments["cu_num_draft_tokens_ptr"][:num_reqs].long()
    num_drafts = cumulated.diff(prepend=cumulated.new_zeros(1))
    num_valid = arguments["valid_sampled_tokens_count_ptr"][:num_reqs].long()
    num_rejected = torch.where(num_drafts > 0, num_drafts + 1 - num_valid, 0)
    last = arguments["query_start_loc_gpu_ptr"][1 : num_reqs + 1].long() - 1
    results = [arguments[name].clone() for name in _DRAFTING_WRITES]
    for result, value in zip(results, (last - num_rejected, num_rejected), strict=True):
        result[:num_reqs] = value
    return results


_REJECTION = "vllm_ascend.ops.triton.reject_sample"
KERNELS: Mapping[str, TritonKernel] = {
    "vllm.v1.worker.block_table._compute_slot_mapping_kernel": TritonKernel(
        ("slot_mapping_ptr",), sampling.compute_slot_mapping
    ),
    "vllm_ascend.ops.triton.compute_slot_mapping._compute_slot_mapping_kernel": TritonKernel(  # since 0.26.0rc1
        ("slot_mapping_ptr",), sampling.compute_slot_mapping
    ),
    "vllm_ascend.ops.triton.bincount.token_bin_counts_and_mask_kernel": TritonKernel(
        ("bin_counts_ptr",), sampling.token_bin_counts
    ),
    "vllm_ascend.ops.triton.penalty.apply_all_penalties_kernel": TritonKernel(
        ("logits_ptr",), sampling.apply_all_penalties
    ),
    "vllm_ascend.ops.triton.spec_decode.utils.prepare_inputs_padded_kernel": TritonKernel(
        _DRAFTING_WRITES, _prepare_drafting
    ),
    "vllm_ascend.ops.triton.rope._triton_rope": TritonKernel(("q_ptr", "k_ptr"), _rope),
    f"{_REJECTION}.expand_kernel": TritonKernel(("output_ptr",), sampling.expand),
    f"{_REJECTION}.rejection_greedy_sample_spec_len_1_triton": TritonKernel(
        ("output_token_ids_ptr",), sampling.accept_greedy_one_draft
    ),
    f"{_REJECTION}.rejection_greedy_sample_triton": TritonKernel(("output_token_ids_ptr",), sampling.accept_greedy),
    f"{_REJECTION}.rejection_random_sample_kernel": TritonKernel(("output_token_ids_ptr",), sampling.accept_random),
    f"{_REJECTION}.sample_recovered_tokens_kernel": TritonKernel(
        ("output_token_ids_ptr",), sampling.sample_recovered_tokens
    ),
}
