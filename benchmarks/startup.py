"""Time and host memory of whole start-ups: the published pair of runs, and how time grows with the number of layers.

python benchmarks/startup.py
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
EXAMPLES = ROOT / "examples"
LAYERS = (12, 48, 96)


def seconds_of_comparison(scenario_path: Path, overrides: dict[str, object]) -> float:
    """Seconds of CPU of one comparison, imports excluded."""
    from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
    from xlite_runner.scenario import load_scenario
    from xlite_runner.simulation import start

    scenario = load_scenario(scenario_path, overrides)
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    begin = time.process_time()
    for policy in (ProfilePolicy.RUNNABLE, ProfilePolicy.SKIP):
        start(scenario, config, policy)
    return time.process_time() - begin


def main() -> None:
    begin = time.process_time()
    import torch
    import torch.distributed

    from npusim import SimWorld

    with SimWorld():
        import xlite_runner.engine  # noqa: F401 - imported for its cost
    console = Console()
    console.print(
        f"imports {time.process_time() - begin:.2f} s, torch {torch.__version__}, Python {sys.version.split()[0]}"
    )
    seed = EXAMPLES / "qwen3-30b-a3b-tp2-ep2.toml"
    seconds = seconds_of_comparison(seed, {})
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"compare {seed.name}: {seconds:.2f} s after imports, peak host memory {peak_mib:.0f} MiB")

    table = Table(title="both policies, by number of layers")
    for column in ("layers", "seconds", "ms per layer"):
        table.add_column(column, justify="right")
    model = json.loads((EXAMPLES / "models" / "Qwen3-30B-A3B.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        for layers in LAYERS:
            path = Path(folder) / f"{layers}.json"
            path.write_text(json.dumps(model | {"num_hidden_layers": layers, "max_window_layers": layers}))
            # Narrow experts, so that 96 layers fit on the card too; they cost the same number of operators.
            path.write_text(json.dumps(json.loads(path.read_text()) | {"moe_intermediate_size": 256}))
            seconds = seconds_of_comparison(seed, {"model": path})
            table.add_row(str(layers), f"{seconds:.2f}", f"{seconds / layers * 1000:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
