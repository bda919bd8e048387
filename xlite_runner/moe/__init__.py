"""Mixture-of-experts layers, split as upstream splits them.

``prepare_finalize`` brings tokens to the ranks that route them and back, ``experts_selector`` routes,
``token_dispatcher`` brings tokens to their experts and back, ``mlp`` runs the experts, ``comm_method`` puts one way of
communication together, ``fused_moe`` is the layer.

The peak of a profile run is nearly always in one of these layers, so which local variable keeps which tensor until when
is upstream's, down to small index tensors.
"""
