"""Published serving and operator figures beside what the cost model predicts, cell by cell.

Decode steps of ``concurrency`` requests, half way through their output, and their share of the steps that also take in
a new request. Three rows of costs were set so that the first table comes out (docs/time.md); all else is a check.

    python benchmarks/published_tables.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from npusim.device.cost import ENGINE, GRAPH_TASK_NS, VECTOR_START_NS, CostModel, Product, Unit, Work
from npusim.device.profile import load_profile
from npusim.xlite.config import DeviceFacts, ModelConfig
from npusim.xlite.rank_model import RankModel
from npusim.xlite.work import ForwardTime, Lengths

NS_PER_MS = 1_000_000
INPUT_TOKENS = OUTPUT_TOKENS = 512
"""Of a request. The output follows from the tables; the input is assumed, as in a later table of the team (#6715)."""
EXTRA_KERNELS = 5
"""Vector kernels that a layer of the torch model has and xlite has fused away."""

Mode = Literal["aclgraph", "full", "decode-only"]
MODES: tuple[Mode, ...] = ("aclgraph", "full", "decode-only")

DENSE = {
    "Qwen3-32B": {"hidden_size": 5120, "n_layers": 64, "n_heads": 64, "n_kv_heads": 8, "intermediate_size": 25600},
    "Qwen3-VL-8B": {"hidden_size": 4096, "n_layers": 36, "n_heads": 32, "n_kv_heads": 8, "intermediate_size": 12288},
    "Qwen2-32B": {"hidden_size": 5120, "n_layers": 64, "n_heads": 40, "n_kv_heads": 8, "intermediate_size": 27648},
    "Llama-7B": {"hidden_size": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "intermediate_size": 11008},
    "Llama-13B": {"hidden_size": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "intermediate_size": 13824},
    "Llama-34B": {"hidden_size": 8192, "n_layers": 48, "n_heads": 64, "n_kv_heads": 8, "intermediate_size": 22016},
}
MIXTURES = {
    "Qwen3-30B-A3B": {
        "hidden_size": 2048,
        "n_layers": 48,
        "n_heads": 32,
        "n_kv_heads": 4,
        "n_routed_experts": 128,
        "n_act_experts": 8,
        "moe_intermediate_size": 768,
    },
}
OPERATORS_PER_LAYER = {"dense": 15, "mixture": 22}
"""Launches of the runner's torch models in a step that is not captured, counted on the simulated device."""


def rank_model(name: str, tp: int, profile: str) -> RankModel:
    """Rank 0 of a model, experts split over TP ranks by intermediate size."""
    sizes = DENSE.get(name) or MIXTURES[name]
    limits = {
        "block_size": 128,
        "max_m": 8192,
        "max_batch_size": 256,
        "max_seq_len": 8192,
        "vocab_size": 151936,
        "head_dim": 128,
    }
    dense = sizes["n_layers"] if name in DENSE else 0
    groups = {"def_tp_size": tp, "def_dp_size": 1, "moe_ep_size": 1, "moe_tp_size": tp, "n_dense_layers": dense}
    device = load_profile(profile)
    facts = DeviceFacts(num_ai_cores=device.num_aicore.value, devices_per_node=device.devices_per_node.value)
    return RankModel(config=ModelConfig(**limits, **sizes, **groups), device=facts)


@dataclass(frozen=True)
class Engine:
    """One engine: predicts its steps, in milliseconds."""

    name: str
    tp: int
    profile: str
    mode: Mode

    def _forward_ns(self, lens: Sequence[int], cached_lens: Sequence[int]) -> int:
        model = rank_model(self.name, self.tp, self.profile)
        return ForwardTime(model, CostModel(load_profile(self.profile)))(Lengths(lens, cached_lens))

    @property
    def _num_layers(self) -> int:
        return rank_model(self.name, self.tp, self.profile).config.n_layers

    def _host_ns(self, num_requests: int) -> int:
        return ENGINE.step_ns + num_requests * ENGINE.request_ns

    def decode_ms(self, batch: int) -> float:
        """A step in which every request gets a token."""
        total = self._host_ns(batch) + self._forward_ns([1] * batch, [INPUT_TOKENS + OUTPUT_TOKENS // 2] * batch)
        if self.mode == "aclgraph":
            total += self._num_layers * (GRAPH_TASK_NS + EXTRA_KERNELS * VECTOR_START_NS)
        return total / NS_PER_MS

    def prefill_ms(self, batch: int) -> float:
        """A step in which one request is new: all in xlite in full mode, else operator by operator."""
        others = batch - 1
        device_ns = self._forward_ns([INPUT_TOKENS] + [1] * others, [0] + [INPUT_TOKENS + OUTPUT_TOKENS // 2] * others)
        if self.mode != "full":
            kind = "dense" if self.name in DENSE else "mixture"
            device_ns = max(device_ns, self._num_layers * OPERATORS_PER_LAYER[kind] * ENGINE.operator_ns)
        return (self._host_ns(batch) + device_ns) / NS_PER_MS

    def tpot_ms(self, concurrency: int) -> float:
        """Time per output token: of the steps in a request's life, each other request starts in one."""
        decode = self.decode_ms(concurrency)
        return decode + (concurrency - 1) / OUTPUT_TOKENS * (self.prefill_ms(concurrency) - decode)


TPOT_4526: Mapping[int, tuple[float, ...]] = {
    1: (16.75, 12.78, 12.81),
    16: (20.15, 14.81, 17.27),
    32: (26.10, 17.37, 22.07),
    48: (30.17, 19.84, 26.73),
}
TPOT_5951: Mapping[int, tuple[float, ...]] = {
    1: (12.34, 11.71, 12.16),
    16: (22.78, 15.96, 19.23),
    32: (32.20, 19.95, 25.19),
    48: (41.02, 23.29, 31.48),
    64: (47.79, 25.09, 38.67),
    100: (60.89, 30.70, 52.71),
    150: (73.60, 37.90, 67.40),
    200: (88.26, 45.54, 85.18),
}
TPOT_5228: Mapping[int, tuple[float | None, ...]] = {1: (27.75, 11.44, 11.47), 16: (None, 15.09, None)}
"""TPOT in ms by concurrency, in the order of MODES, on 910B3. vllm-ascend pull requests of these numbers."""

STANDALONE = (
    ("Llama-7B", 1, 1, 0, 22.4),
    ("Llama-13B", 4, 1, 0, 12.5),
    ("Llama-13B", 4, 16, 0, 18.64),
    ("Llama-34B", 8, 1, 0, 16.49),
    ("Llama-34B", 8, 16, 0, 18.74),
    ("Qwen2-32B", 8, 16, 0, 23.86),
    ("Qwen3-32B", 8, 1, 0, 17.71),
    ("Qwen3-32B", 8, 16, 0, 20.22),
    ("Llama-13B", 4, 1, 3312, 218.47),
    ("Llama-34B", 8, 1, 3312, 274.26),
    ("Qwen2-32B", 8, 1, 2629, 252.08),
    ("Qwen3-32B", 8, 1, 2630, 230.96),
    ("Qwen3-30B-A3B", 8, 1, 2630, 99.48),
)
"""xlite without vLLM on 910B4: model, TP, batch, prompt (0: a decode step), ms. openeuler-mirror/GVirt, merge !85."""

MATMULS = (
    (1024, 1024, 1024, 16, 99.86),
    (2048, 2048, 2048, 16, 248.30),
    (4096, 4096, 4096, 16, 315.36),
    (8192, 8192, 8192, 16, 301.23),
    (10240, 10240, 10240, 16, 300.94),
    (1024, 1024, 1024, 32, 46.30),
    (2048, 2048, 2048, 32, 76.92),
    (4096, 4096, 4096, 32, 84.53),
    (8192, 8192, 8192, 32, 80.43),
    (6912, 2048, 16384, 16, 291.58),
    (6144, 2816, 17920, 16, 301.26),
    (14336, 4096, 4096, 16, 317.32),
)
"""Rows, inner, columns, bits, TFLOPS on 910B2 and 910B2C. zzc0721/torch-performance-test-data #109; gpu_benchmark."""

COLLECTIVES = (
    ("all_reduce", 2, 18.0),
    ("all_reduce", 4, 30.0),
    ("all_reduce", 8, 72.0),
    ("all_gather", 2, 38.0),
    ("all_gather", 4, 64.0),
    ("all_gather", 8, 149.0),
)
"""Collective, cards of a 910B node, GB/s of the whole tensor. limulidae benchmark, CANN 8.0.0.beta1."""


@dataclass(frozen=True)
class Cell:
    """One published figure."""

    table: str
    row: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.published - 1


def serving_cells(
    title: str, name: str, tp: int, table: Mapping[int, Sequence[float | None]], profile: str = "a2-64g"
) -> Iterator[Cell]:
    """TPOT in ms of one table, with a size of the TP group."""
    for concurrency, figures in table.items():
        for mode, published in zip(MODES, figures, strict=True):
            if published is not None:
                predicted = Engine(name, tp, profile, mode).tpot_ms(concurrency)
                yield Cell(f"{title}, TP{tp}", f"{mode}, {concurrency}", published, predicted)


def standalone_cells() -> Iterator[Cell]:
    """Steps of xlite alone, ms."""
    costs = CostModel(load_profile("a2-32g"))
    for name, tp, batch, prompt, published in STANDALONE:
        lengths = Lengths([prompt], [0]) if prompt else Lengths([1] * batch, [INPUT_TOKENS] * batch)
        step = f"prompt of {prompt}" if prompt else f"decode, {batch}"
        predicted = ForwardTime(rank_model(name, tp, "a2-32g"), costs)(lengths) / NS_PER_MS
        yield Cell("xlite alone, 910B4, ms", f"{name} TP{tp}, {step}", published, predicted)


def operator_cells() -> Iterator[Cell]:
    """Matrix products in TFLOPS, collectives in GB/s, the rate of attention."""
    cube = CostModel(load_profile("a3-64g"))  # whose die has the 910B2's cores and clock
    for rows, inner, columns, bits, published in MATMULS:
        moved = (rows * inner + inner * columns + rows * columns) * bits // 8
        work = Work(Unit.MATMUL, moved, (Product(rows, inner, columns, 1, bits),))
        rate = 2 * rows * inner * columns / cube.kernel_ns(work) / 1e3
        yield Cell("products, 910B2, TFLOPS", f"{rows} x {inner} x {columns}, {bits} bits", published, rate)
    mesh, num_bytes = CostModel(load_profile("a2-64g")), 1 << 30
    for name, num_ranks, published in COLLECTIVES:
        rate = num_bytes / mesh.collective_ns(name, num_bytes, num_ranks)
        yield Cell("collectives, 910B, GB/s", f"{name} on {num_ranks}", published, rate)


def cells() -> Iterator[Cell]:
    """Every table; the first is the one that the engine's costs are calibrated on."""
    yield from serving_cells("Qwen3-32B (#4526)", "Qwen3-32B", 8, TPOT_4526)
    for tp in (2, 4, 8):
        yield from serving_cells("Qwen3-30B-A3B (#5951)", "Qwen3-30B-A3B", tp, TPOT_5951)
    for tp in (1, 2, 4):
        yield from serving_cells("Qwen3-VL-8B (#5228)", "Qwen3-VL-8B", tp, TPOT_5228)
    yield from serving_cells("Qwen3-32B, tuning log", "Qwen3-32B", 2, {1: (33.6, None, None)})
    yield from standalone_cells()
    yield from operator_cells()


def main() -> None:
    console = Console(width=110)
    shown: dict[str, list[Cell]] = {}
    for cell in cells():
        shown.setdefault(cell.table, []).append(cell)
    for title, rows in shown.items():
        table = Table(title=title)
        for column in ("", "published", "predicted", "error"):
            table.add_column(column, justify="right" if column else "left")
        for cell in rows:
            table.add_row(cell.row, f"{cell.published:.2f}", f"{cell.predicted:.2f}", f"{cell.error:+.0%}")
        mean = sum(abs(cell.error) for cell in rows) / len(rows)
        table.add_row("mean of absolute errors", "", "", f"{mean:.0%}")
        console.print(table)


if __name__ == "__main__":
    main()
