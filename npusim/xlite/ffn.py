"""Dense feed-forward layers, and the shared experts of MoE layers."""

from __future__ import annotations

from npusim.xlite.collectives import reduce_hidden
from npusim.xlite.config import QuantKind
from npusim.xlite.forward_pass import ForwardPass
from npusim.xlite.linear import linear
from npusim.xlite.tensors import Tensor


def dense_ffn(run: ForwardPass, hidden: Tensor) -> None:
    """The FFN of a dense layer, summed over TP while both of its tensors are live."""
    weights = run.model.weights
    gate_up, activated = _mlp(run, hidden, run.model.mlp_width, weights.mlp_up_gate, weights.mlp_down)
    reduce_hidden(run, hidden)
    run.put(activated)
    run.put(gate_up)


def shared_experts(run: ForwardPass, hidden: Tensor) -> None:
    """The shared experts of an MoE layer; the layer sums over TP once for all its experts."""
    weights = run.model.weights
    gate_up, activated = _mlp(run, hidden, run.model.shared_width, weights.se_up_gate, weights.se_down)
    run.put(activated)
    run.put(gate_up)


def _mlp(run: ForwardPass, hidden: Tensor, width: int, up_gate: QuantKind, down: QuantKind) -> tuple[Tensor, Tensor]:
    take = run.taker("ForwardMLP")
    gate_up = take(run.step.num_tokens, 2 * width)
    activated = take(run.step.num_tokens, width)
    linear(run, hidden, up_gate)
    linear(run, activated, down)
    return gate_up, activated
