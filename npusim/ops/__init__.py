"""The operators: what each allocates, what it computes, what it costs. One module per family."""

from __future__ import annotations

from importlib import import_module

FAMILIES = (
    "activation",
    "elementwise",
    "grouped_matmul",
    "matmul",
    "moe_comm",
    "moe_routing",
    "norm",
    "random",
    "reduction",
    "rope",
    "sampling",
)


def declare_all() -> None:
    """Import every family, so that its operators are declared."""
    import npusim.torch_backend.factories  # noqa: F401 - declares kernels

    for family in FAMILIES:
        import_module(f"npusim.ops.{family}")
