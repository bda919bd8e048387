"""Repetition, frequency and presence penalties on the device.

vllm-ascend applies them by Triton kernels: token counts and masks of prompt and output, then one pass over the logits
that takes no memory. Here the same tensors are made, and the pass is a few operators in place, for which the memory of
the prompt's counts serves once the counts are no longer needed. So memory is that of the kernels without Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from xlite_runner.serving.sample.sampling_metadata import Penalties
from xlite_runner.serving.worker.host_twin import to_device


def apply_penalties(
    logits: torch.Tensor,
    penalties: Penalties,
    output_token_ids: Sequence[Sequence[int]],
    rows: torch.Tensor | None = None,
) -> None:
    """Change logits in place.

    Args:
        logits: [rows, vocabulary] float32.
        penalties: Of the batch.
        output_token_ids: What counts as output, for each row of the logits.
        rows: Row of the batch that each row of the logits belongs to; None if they are the same.
    """
    prompt_ids, frequency, presence, repetition = (
        column if rows is None else column[rows]
        for column in (penalties.prompt_token_ids, penalties.frequency, penalties.presence, penalties.repetition)
    )
    prompt_counts, prompt_mask = _token_counts_and_mask(prompt_ids, logits)
    output_ids = to_device(_padded(output_token_ids, pad=logits.shape[1]), logits.device)
    output_counts, output_mask = _token_counts_and_mask(output_ids, logits)

    scratch = prompt_counts.view(torch.float32)
    is_free = prompt_mask.logical_or_(output_mask).logical_not_()
    torch.sign(logits, out=scratch).neg_().masked_fill_(is_free, 0)
    # Repetition: to the power of 1 where the logit is negative, -1 where it is positive, 0 where the token is new.
    torch.pow(repetition.unsqueeze(1), scratch, out=scratch)
    logits.mul_(scratch)
    logits.sub_(scratch.copy_(output_counts).mul_(frequency.unsqueeze(1)))
    logits.sub_(scratch.copy_(output_mask).mul_(presence.unsqueeze(1)))


def _token_counts_and_mask(token_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each token occurs in each row, int32, and whether it does; padding is counted beside the vocabulary."""
    num_rows, vocab_size = logits.shape
    counts = torch.zeros((num_rows, vocab_size + 1), dtype=torch.int32, device=logits.device)
    counts.scatter_add_(1, token_ids, counts.new_ones(1).expand(token_ids.shape))
    counts = counts[:, :vocab_size]
    return counts, counts > 0


def _padded(token_ids: Sequence[Sequence[int]], pad: int) -> np.ndarray:
    padded = np.full((len(token_ids), max(map(len, token_ids))), pad, dtype=np.int64)
    for row, ids in zip(padded, token_ids, strict=True):
        row[: len(ids)] = ids
    return padded
