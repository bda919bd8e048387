"""What one operator costs on the simulated device, with all its memory accounted for, beside torch's FakeTensorMode.

Both run the same layers in the same process: bf16 linear layers, and a small SwiGLU block. FakeTensorMode accounts for
no memory.

    python benchmarks/dispatch.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from npusim import SimWorld

REPETITIONS = 400
ROUNDS = 7


def linear(device: str) -> Callable[[], object]:
    layer = nn.Linear(2048, 2560, bias=False, dtype=torch.bfloat16, device=device)
    inputs = torch.empty(512, 2048, dtype=torch.bfloat16, device=device)
    return lambda: layer(inputs)


def swiglu_block(device: str) -> Callable[[], object]:
    gate_up = nn.Linear(2048, 12288, bias=False, dtype=torch.bfloat16, device=device)
    down = nn.Linear(6144, 2048, bias=False, dtype=torch.bfloat16, device=device)
    inputs = torch.empty(512, 2048, dtype=torch.bfloat16, device=device)

    def block() -> object:
        gate, up = gate_up(inputs).chunk(2, dim=-1)
        return inputs + down(nn.functional.silu(gate) * up)

    return block


def best_us(run: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Microseconds of one run: the best of several rounds, which other load on the machine disturbs least."""
    for _ in range(20):
        run()
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(repetitions):
            run()
        rounds.append((time.process_time() - start) / repetitions)
    return min(rounds) * 1e6


def main() -> None:
    table = Table(title=f"microseconds of CPU per run, best of {ROUNDS} rounds of {REPETITIONS}")
    for column in ("layers", "npusim, accounted", "FakeTensorMode", "ratio"):
        table.add_column(column, justify="left" if column == "layers" else "right")
    for name, make in (("Linear, bf16", linear), ("SwiGLU block, bf16", swiglu_block)):
        with SimWorld(environment={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}), torch.inference_mode():
            ours = best_us(make("npu"))
        with FakeTensorMode(), torch.inference_mode():
            fake = best_us(make("cpu"))
        table.add_row(name, f"{ours:.1f}", f"{fake:.1f}", f"{ours / fake:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
