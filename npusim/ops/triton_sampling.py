"""What Triton kernels compute between two forward passes: slots of tokens, penalties, and which drafts are accepted.

Each function gets a kernel's arguments by name, tensors on the host, and returns the new values of what it writes, as
the kernel's source in vllm and vllm-ascend 0.22.1 and 0.23.0 says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError

Arguments = Mapping[str, Any]


def compute_slot_mapping(arguments: Arguments) -> list[Tensor]:
    """Cache slot of each token: its block's first slot and its place there; the rest of the buffer is padding."""
    if arguments["TOTAL_CP_WORLD_SIZE"] != 1:
        raise UnmodelledCallError("_compute_slot_mapping_kernel with context parallelism is not modelled")
    if arguments.get("IS_CIRCULAR", False):
        raise UnmodelledCallError("_compute_slot_mapping_kernel with a circular block table is not modelled")
    starts, positions = arguments["query_start_loc_ptr"].long(), arguments["positions_ptr"]
    block_size, num_tokens = arguments["block_size"], int(starts[-1])
    requests = torch.repeat_interleave(torch.arange(len(starts) - 1, device="cpu"), starts.diff())
    positions = positions[:num_tokens]
    blocks = arguments["block_table_ptr"][requests, positions // block_size].long()
    slots = arguments["slot_mapping_ptr"].clone()
    slots[arguments["num_tokens"] : arguments["max_num_tokens"]] = arguments["PAD_ID"]
    slots[:num_tokens] = (blocks * block_size + positions % block_size).to(slots.dtype)
    return [slots]


def token_bin_counts(arguments: Arguments) -> list[Tensor]:
    """How often each token of this rank's part of the vocabulary occurs in each row; padding lies outside of it.

    In 0.30.0rc2 there are no parts, and no argument ``tp_rank``.
    """
    counts, vocab_size = arguments["bin_counts_ptr"].clone(), arguments["vocab_size"]
    tokens = arguments["tokens_ptr"].long() - arguments.get("tp_rank", 0) * vocab_size
    inside = (tokens >= 0) & (tokens < vocab_size)
    counts.scatter_add_(1, torch.where(inside, tokens, 0), inside.to(counts.dtype))
    return [counts]


def apply_all_penalties(arguments: Arguments) -> list[Tensor]:
    """Repetition of tokens of prompt or output, then frequency and presence in the output."""
    logits, output = arguments["logits_ptr"].float(), arguments["output_mask_ptr"]
    repetition, frequency, presence = (
        arguments[f"{name}_penalties_ptr"].float().unsqueeze(1) for name in ("repetition", "frequency", "presence")
    )
    factor = torch.where(arguments["prompt_mask_ptr"] | output, repetition, 1.0)
    logits = logits * torch.where(logits > 0, 1 / factor, factor)
    logits = logits - frequency * arguments["output_bin_counts_ptr"] - presence * output.float()
    return [logits.to(arguments["logits_ptr"].dtype)]


def expand(arguments: Arguments) -> list[Tensor]:
    """Each request's number, for each of its draft tokens."""
    values, ends = arguments["input_ptr"], arguments["cu_num_tokens_ptr"].long()
    values = torch.where(values == arguments["replace_from"], arguments["replace_to"], values)
    expanded = arguments["output_ptr"].clone()
    expanded[: int(ends[-1])] = torch.repeat_interleave(values, ends.diff(prepend=ends.new_zeros(1))).to(expanded.dtype)
    return [expanded]


def accept_greedy_one_draft(arguments: Arguments) -> list[Tensor]:
    """One draft per request: the target's choice, and the bonus token if the draft was that."""
    output, target = arguments["output_token_ids_ptr"].clone(), arguments["target_argmax_ptr"]
    accepted = arguments["draft_token_ids_ptr"] == target
    output[:, 0] = target
    output[:, 1] = torch.where(accepted, arguments["bonus_token_ids_ptr"].flatten(), output[:, 1])
    return [output]


def _drafts(arguments: Arguments, *, greedy: bool) -> Iterator[tuple[int, range]]:
    """The requests that are, or are not, greedy, each with the indices of its draft tokens."""
    chosen, start = arguments.get("is_greedy_ptr"), 0
    for request, end in enumerate(arguments["cu_num_draft_tokens_ptr"].tolist()):
        if chosen is None or bool(chosen[request]) is greedy:
            yield request, range(start, end)
        start = end


def accept_greedy(arguments: Arguments) -> list[Tensor]:
    """The target's choices up to the first that differs from the draft; after all drafts the bonus token."""
    output, bonus = arguments["output_token_ids_ptr"].clone(), arguments["bonus_token_ids_ptr"].flatten()
    draft, target = arguments["draft_token_ids_ptr"], arguments["target_argmax_ptr"]
    for request, indices in _drafts(arguments, greedy=True):
        for position, index in enumerate(indices):
            output[request, position] = target[index]
            if draft[index] != target[index]:
                break
        else:
            output[request, len(indices)] = bonus[request]
    return [output]


def accept_random(arguments: Arguments) -> list[Tensor]:
    """Drafts up to the first that is rejected, in whose place a recovered token comes; after all the bonus token."""
    if arguments["ENABLE_REDUCE_SAMPLING"] or arguments["ENTROPY_VERIFY"]:
        raise UnmodelledCallError("rejection_random_sample_kernel is modelled without reduced sampling and entropy")
    output, bonus = arguments["output_token_ids_ptr"].clone(), arguments["bonus_token_ids_ptr"].flatten()
    draft, recovered = arguments["draft_token_ids_ptr"], arguments["recovered_token_ids_ptr"]
    probs, draft_probs = arguments["target_probs_ptr"], arguments.get("draft_probs_ptr")
    for request, indices in _drafts(arguments, greedy=False):
        for position, index in enumerate(indices):
            token = int(draft[index])
            draft_prob = 1.0 if draft_probs is None else float(draft_probs[index, token])
            accepted = token != -1 and draft_prob > 0
            if not accepted or probs[index, token] / draft_prob < arguments["uniform_probs_ptr"][index]:
                output[request, position] = recovered[index]
                break
            output[request, position] = token
        else:
            output[request, len(indices)] = bonus[request]
    return [output]


def sample_recovered_tokens(arguments: Arguments) -> list[Tensor]:
    """For each draft the token to take if it is rejected: by the probability that the draft leaves over."""
    if arguments["ENABLE_REDUCE_SAMPLING"]:
        raise UnmodelledCallError("sample_recovered_tokens_kernel is modelled without reduced sampling")
    output, draft_probs = arguments["output_token_ids_ptr"].clone(), arguments.get("draft_probs_ptr")
    for request, indices in _drafts(arguments, greedy=False):
        for index in indices:
            probs = arguments["target_probs_ptr"][index].clone()
            if draft_probs is None:
                probs[int(arguments["draft_token_ids_ptr"][index])] = 0
            else:
                probs = (probs - draft_probs[index]).clamp(min=0)
            output[index] = (probs / arguments["q_ptr"][request]).argmax()
    return [output]
