"""How long work takes on a device: rooflines over its profile's rates. Arithmetic on bytes, operations and counts only.

Every figure here that no profile holds is that of kernels and software, the same on all cards until somebody measures
otherwise. What is predicted with them, and how far that is from published figures, is in ``docs/time.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

from npusim.device.clock import NS_PER_S
from npusim.device.profile import DeviceProfile

MATMUL_HBM_EFFICIENCY: Final = 0.85
"""Part of the memory's rate that streaming a weight reaches. Calibrated: docs/time.md, Qwen3-32B."""
ATTENTION_HBM_EFFICIENCY: Final = 0.485
"""The same for keys and values by pages. Calibrated: 774 to 783 GB/s in FusedInferAttentionScore's decode step
(vllm-ascend #11266), taken for a memory of 1.6 TB/s."""
VECTOR_HBM_EFFICIENCY: Final = 0.4
"""The same for elementwise kernels and norms. Calibrated: 640 and 642 GB/s in torch.sigmoid and torch.exp on a 910B
(limulidae benchmark)."""
CUBE_EFFICIENCY: Final = 0.88
"""Part of the cube cores' rate that whole rounds of tiles reach. Calibrated: matrix products of 2048 to 10240 rows on a
910B2 (torch-performance-test-data issue #109)."""
ATTENTION_CUBE_EFFICIENCY: Final = 0.5
"""The same for attention over many queries, whose softmax the vector cores do meanwhile. Assumed."""
TILE_ROWS: Final = 128
TILE_COLUMNS: Final = 256
"""Part of a product that a core makes at a time. Assumed: the usual tiling of 16-bit products on A2."""
CUBE_GRAIN: Final = 16
"""Rows and columns that the cube multiplies at once; smaller operands are padded. Exact: CANN platform_config ini."""

MATMUL_START_NS: Final = 5_000
VECTOR_START_NS: Final = 2_000
"""What a kernel takes besides its work. Calibrated: Ascend/msmodeling 84fec85, static cost of its operators."""
COLLECTIVE_LATENCY_NS: Final = 25_000
"""What a collective takes however small it is. Calibrated: docs/time.md, Qwen3-32B at TP8."""
GRAPH_TASK_NS: Final = 50_000
"""What an operator of a replayed graph takes longer if its arguments are updated for the replay. Calibrated:
docs/time.md, Qwen3-32B at TP8."""
HOST_COLLECTIVE_NS: Final = 100_000
"""A collective of host tensors over gloo, within a node. Assumed."""
COPY_LATENCY_NS: Final = 10_000
"""What a copy between host and device takes however small it is. Assumed."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """What software costs the host, in nanoseconds.

    Attributes:
        operator_ns: Launching one operator, or a captured graph, from Python.
        step_ns: An engine's step besides that: scheduling, inputs, outputs.
        request_ns: What each request of a step adds.
    """

    operator_ns: int
    step_ns: int = 0
    request_ns: int = 0


BARE_LOOP: Final = HostCosts(operator_ns=20_000)
"""A program that does nothing but launch operators. Calibrated: products of 1024 rows, which the host keeps a 910B2
waiting for, take 21.5 us each (torch-performance-test-data issue #109)."""
ENGINE: Final = HostCosts(operator_ns=125_000, step_ns=1_600_000, request_ns=25_000)
"""vLLM on Ascend. Calibrated: docs/time.md, Qwen3-32B at TP8."""


class Unit(Enum):
    """What a kernel is made of, which decides how fast it reads and what starting it takes."""

    VECTOR = (VECTOR_HBM_EFFICIENCY, VECTOR_START_NS)
    MATMUL = (MATMUL_HBM_EFFICIENCY, MATMUL_START_NS)
    ATTENTION = (ATTENTION_HBM_EFFICIENCY, MATMUL_START_NS)

    def __init__(self, hbm_efficiency: float, start_ns: int) -> None:
        self.hbm_efficiency = hbm_efficiency
        self.start_ns = start_ns


class Product(NamedTuple):
    """``batch`` matrix products of (rows, inner) by (inner, columns), whose operands have ``bits`` each."""

    rows: int
    inner: int
    columns: int
    batch: int = 1
    bits: int = 16


class Sending(NamedTuple):
    """A collective: its kind, the bytes of the whole tensor, its ranks (see :meth:`CostModel.collective_ns`)."""

    name: str
    num_bytes: int
    num_ranks: int


class Work(NamedTuple):
    """What one kernel does.

    Attributes:
        unit: What it is made of.
        num_bytes: Moved between memory and cores.
        products: Its matrix products.
        attention_flops: Floating-point operations of attention's own products.
        sending: A collective within the kernel.
    """

    unit: Unit
    num_bytes: int
    products: tuple[Product, ...] = ()
    attention_flops: int = 0
    sending: Sending | None = None


def product_work(
    first: Sequence[int], second: Sequence[int], itemsize: int, result_bytes: int, transposed: bool
) -> Work:
    """A kernel that multiplies tensors of these sizes, both of elements of ``itemsize`` bytes.

    Args:
        first: Size of the left operand, whose last dimension is summed over.
        second: Of the right one; with three dimensions, one product for each index of the first.
        itemsize: Bytes of an element.
        result_bytes: Of the result.
        transposed: Whether the right operand's last dimension is summed over.
    """
    inner = first[-1] or 1
    columns = second[0 if transposed else -1] if len(second) > 1 else 1
    batch = second[0] if len(second) == 3 else 1
    moved = (prod(first) + prod(second)) * itemsize + result_bytes
    product = Product(prod(first) // inner // (batch or 1), inner, columns, batch, min(itemsize, 4) * 8)
    return Work(Unit.MATMUL, moved, (product,))


COLLECTIVE_PASSES: Final = {"all_reduce": 2, "reduce": 2, "broadcast": 2}
"""How often a collective sends a tensor's parts around, if not once: an all-reduce scatters sums and gathers them."""


class CostModel:
    """Durations on one kind of device, in nanoseconds.

    Args:
        profile: Its rates.

    Attributes:
        product_ns: The kernel of :func:`product_work`; remembered, since a model's layers multiply the same sizes.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile: Final = profile
        self._ns_per_byte = NS_PER_S / profile.hbm_bytes_per_s.value
        self._vector_ns_per_byte = self._ns_per_byte / VECTOR_HBM_EFFICIENCY
        self._ns_per_flop = NS_PER_S / profile.cube_flops_per_s.value
        self.product_ns = lru_cache(maxsize=4096)(self._compute_duration_of_product)
        self._product_ns = lru_cache(maxsize=1024)(self._compute_product_ns)

    def vector_ns(self, num_bytes: int) -> int:
        """A kernel that only moves bytes through the vector cores."""
        return VECTOR_START_NS + round(num_bytes * self._vector_ns_per_byte)

    def kernel_ns(self, work: Work) -> int:
        """Any kernel: the longer of moving its bytes and doing its products, its start, and what it sends after that.

        Kernels that compute and send (MC2) do both at once; that they take the sum is assumed.
        """
        computing_ns = work.unit.start_ns + round(max(self.memory_ns(work), self.cube_ns(work)))
        return computing_ns if work.sending is None else computing_ns + self.collective_ns(*work.sending)

    def _compute_duration_of_product(
        self, first: Sequence[int], second: Sequence[int], itemsize: int, result_bytes: int, transposed: bool
    ) -> int:
        return self.kernel_ns(product_work(first, second, itemsize, result_bytes, transposed))

    def memory_ns(self, work: Work) -> float:
        """What moving a kernel's bytes takes."""
        return work.num_bytes * self._ns_per_byte / work.unit.hbm_efficiency

    def cube_ns(self, work: Work) -> float:
        """What a kernel's products take."""
        total = work.attention_flops * self._ns_per_flop / ATTENTION_CUBE_EFFICIENCY
        for product in work.products:
            total += self._product_ns(product)
        return total

    def _compute_product_ns(self, product: Product) -> float:
        """Whole rounds of tiles over the cores; a product of fewer tiles than cores is cut so that all have work."""
        rows, inner, columns = (_whole(extent, CUBE_GRAIN) for extent in product[:3])
        flops = 2 * rows * inner * columns * product.batch
        num_cores = self.profile.num_aicore.value
        num_tiles = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS) * product.batch
        if num_tiles > num_cores:
            tile_flops = 2 * min(rows, TILE_ROWS) * min(columns, TILE_COLUMNS) * inner
            flops = _whole(num_tiles, num_cores) * tile_flops
        return flops * product.bits / 16 * self._ns_per_flop * (2 if product.bits == 32 else 1) / CUBE_EFFICIENCY

    def collective_ns(self, name: str, num_bytes: int, num_ranks: int) -> int:
        """A collective of ranks that have all arrived.

        Args:
            name: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``reduce`` or ``broadcast``.
            num_bytes: Of the whole tensor: the reduced one, the gathered one, the one to be scattered, or all that a
                rank sends.
            num_ranks: Ranks of the group; those of a node first, as everywhere in torch.distributed.
        """
        if num_ranks <= 1:
            return 0
        sent_bytes = COLLECTIVE_PASSES.get(name, 1) * num_bytes * (num_ranks - 1) / num_ranks
        return COLLECTIVE_LATENCY_NS + round(sent_bytes * NS_PER_S / self._send_bytes_per_s(num_ranks))

    def _send_bytes_per_s(self, num_ranks: int) -> int:
        """What a rank of a group sends to all others together; the slower kind of link decides."""
        profile = self.profile
        per_node = min(num_ranks, profile.devices_per_node.value)
        links = max(per_node - 1, 1) if profile.link_topology.value == "mesh" else 1
        within_node = links * profile.link_bytes_per_s.value
        return min(within_node, profile.node_link_bytes_per_s.value) if num_ranks > per_node else within_node

    def host_to_device_ns(self, num_bytes: int) -> int:
        """A copy from host memory."""
        return COPY_LATENCY_NS + round(num_bytes * NS_PER_S / self.profile.host_to_device_bytes_per_s.value)

    def device_to_host_ns(self, num_bytes: int) -> int:
        """A copy to host memory."""
        return COPY_LATENCY_NS + round(num_bytes * NS_PER_S / self.profile.device_to_host_bytes_per_s.value)


def _whole(extent: int, grain: int) -> int:
    return -(-extent // grain) * grain
