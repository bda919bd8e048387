"""The operators: what each allocates, what it computes, what it costs. One module per family."""

from __future__ import annotations

from functools import cache
from importlib import import_module

FAMILIES = (
    "activation",
    "attention",
    "attention_atb",
    "attention_fusion",
    "creation",
    "elementwise",
    "format",
    "functional_collectives",
    "gradients",
    "grouped_matmul",
    "indexing",
    "joining",
    "kv_cache",
    "matmul",
    "matmul_comm",
    "mla",
    "moe_comm",
    "moe_gating",
    "moe_routing",
    "norm",
    "quant",
    "random",
    "rearranging",
    "reduction",
    "rope",
    "sampling",
    "subscripts",
)


@cache
def declare_all() -> None:
    """Import every family, so that its operators are declared; define the vendor's other operators, too.

    Vendor code imports those by name, or registers meta kernels for them. Called on a device, they raise.
    """
    import npusim.torch_backend.factories  # noqa: F401 - declares kernels
    from npusim.ops.operator import schemas
    from npusim.torch_backend.registration import define, has_kernel

    for family in FAMILIES:
        import_module(f"npusim.ops.{family}")
    for name, schema in schemas().items():
        namespace, _, unqualified = name.partition("::")
        if not has_kernel(namespace, unqualified):
            define(namespace, schema.partition("::")[2])
