"""The forward pass of an xlite model: embedding, layers, logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from npusim.errors import UnmodelledCallError
from npusim.xlite.arena import round_up
from npusim.xlite.attention_mha import attention_mha
from npusim.xlite.attention_mla import attention_mla
from npusim.xlite.collectives import all_gather, all_reduce, gather_hidden
from npusim.xlite.config import AttnType
from npusim.xlite.ffn import dense_ffn
from npusim.xlite.forward_pass import ForwardPass
from npusim.xlite.moe import moe_ffn
from npusim.xlite.tensors import Tensor

_ATTENTION: Final[dict[int, Callable[[ForwardPass, Tensor], None]]] = {
    AttnType.AttnMHA: attention_mha,
    AttnType.AttnMLA: attention_mla,
    AttnType.AttnDSA: attention_mla,
}


def forward(run: ForwardPass, output: Tensor) -> None:
    """Embed the tokens and run all layers; ``output`` is the caller's tensor of hidden states.

    Raises:
        RuntimeError: The pool is full, or a collective does not fit, with xlite's text.
        UnmodelledCallError: The kind of attention is not modelled.
    """
    if run.config.attn_type not in _ATTENTION:
        raise UnmodelledCallError(f"xlite attention {run.config.attn_type!r} is not modelled; modelled are 0, 1 and 2")
    if run.splits_collectives:
        _forward_split(run, output)
    else:
        _forward_plain(run)


def forward_logits(run: ForwardPass, hidden: Tensor, logits: Tensor) -> None:
    """Logits of one row per request; ``logits`` is the caller's, as (TP ranks, requests, local vocabulary)."""
    if run.step.num_requests < hidden.shape[0]:
        run.put(run.taker("ForwardGetLogits")(run.step.num_requests, run.config.hidden_size))
    if run.model.tp.size > 1:
        all_gather(run, logits.view(*logits.shape[1:]), logits, run.model.tp)


def _forward_plain(run: ForwardPass) -> None:
    residual = run.taker("ForwardEmbedAndLayers")(run.step.num_tokens, run.config.hidden_size)
    all_reduce(run, residual, run.model.tp)
    hidden = run.taker("ForwardLayersNaive")(run.step.padded_tokens, run.config.hidden_size)
    _layers(run, hidden)
    run.put(hidden)
    run.put(residual)


def _forward_split(run: ForwardPass, output: Tensor) -> None:
    """The communication-optimised path: norms see a TP slice, so hidden states are padded to whole slices."""
    n, hidden_size, tp, behaviour = run.step.num_tokens, run.config.hidden_size, run.model.tp, run.model.behaviour
    padded = round_up(n, tp.size)
    residual = run.taker("ForwardEmbedAndLayers")(padded, hidden_size)
    all_reduce(run, residual.view(n, hidden_size) if behaviour.embeds_into_view else residual, tp)
    own = run.taker("ForwardLayersCommOptimize")(max(padded, run.step.padded_tokens), hidden_size)
    target = output if behaviour.writes_callers_output and padded == n else own
    run.hidden_pad = target.view(padded, hidden_size)
    run.hidden_slice = target.view(padded // tp.size, hidden_size)
    _layers(run, target.view(n, hidden_size))
    run.put(own)
    run.put(residual)


def _layers(run: ForwardPass, hidden: Tensor) -> None:
    attention = _ATTENTION[run.config.attn_type]
    for layer in range(run.config.n_layers):
        attention(run, hidden)
        gather_hidden(run)
        ffn = dense_ffn if layer < run.config.n_dense_layers else moe_ffn
        ffn(run, hidden)
        gather_hidden(run)
