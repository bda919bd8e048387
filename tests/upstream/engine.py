"""Starts upstream's own worker, as published and unmodified, on a simulated world that a scenario describes.

One process is one rank: upstream keeps its parallel state, forward context and settings in module globals, which
several ranks of a process would share. The other ranks are taken to do as this one does (``SimWorld(lone_rank=...)``),
which is what tensor-parallel ranks do: they get the same seed, the same inputs, and call the same collectives.

Run as a script inside an environment that has vllm and vllm-ascend; prints a line of JSON for each start-up::

    python -m tests.upstream.engine examples/tiny.toml
    python -m tests.upstream.engine --cases
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from npusim.device.profile import load_profile
from npusim.hook import environment_of_children
from npusim.installation import expose_doubles
from tests.upstream.cases import CASES, REFUSED, Case
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.scenario import Scenario, load_scenario
from xlite_runner.simulation import build_world, ledgers

PRESETS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Nothing can be compiled for the double: models run as written, and there are no piecewise graphs.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
}


@dataclass
class UpstreamResult:
    """What upstream computed on one rank; sizes in bytes."""

    release: str
    rank: int
    weights: int = 0
    peak_activation: int = 0
    non_torch: int = 0
    available: int = 0
    num_blocks: int = 0
    num_tokens: int = 0
    kv_cache: int = 0
    graph: int = 0
    log_lines: list[str] = field(default_factory=list)
    ledger: list[dict[str, Any]] = field(default_factory=list)


def policy_of_installed_release() -> ProfilePolicy:
    """What the installed vllm-ascend's profile run executes in xlite full mode."""
    from importlib.metadata import version

    return ProfilePolicy.RUNNABLE if version("vllm-ascend").startswith("0.22.") else ProfilePolicy.SKIP


def start(scenario: Scenario, rank: int = 0) -> UpstreamResult:
    """Take upstream's worker of one rank through its start-up.

    Raises:
        Exception: What upstream raises.
    """
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    policy = policy_of_installed_release()
    world = build_world(scenario, config, policy, lone_rank=rank)
    child_world = {"profile": scenario.device_profile, "num_devices": scenario.num_ranks}
    # Upstream looks at model classes in a child process.
    os.environ.update(environment_of_children(child_world, {**os.environ, **PRESETS, **scenario.environment}))
    _build_for(world.profile.family)
    with world, model_directory(scenario.model) as model, captured_log() as lines:
        result = _start(scenario, model, rank)
        result.log_lines = lines
        result.ledger = [asdict(row) for row in ledgers(world)[rank]]
        return result


def _build_for(family: str) -> None:
    """Stand in for the file that building vllm-ascend for a kind of device writes; the published wheels are for A2."""
    build_info = ModuleType("vllm_ascend._build_info")
    build_info.__device_type__ = {"310P": "_310P"}.get(family, family)
    sys.modules[build_info.__name__] = build_info


def _start(scenario: Scenario, model: Path, rank: int) -> UpstreamResult:
    import torch
    import vllm_ascend._version
    from vllm.config import set_current_vllm_config
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    # A queue over host shared memory, by which the executor's steps reach the ranks; its readers are other processes,
    # which are not there, and nothing is sent on it during a start-up.
    MessageQueue.create_from_process_group = staticmethod(lambda *args, **kwargs: None)

    config = engine_config(scenario, model)
    result = UpstreamResult(vllm_ascend._version.__version__, rank)
    with set_current_vllm_config(config):
        worker_class = resolve_obj_by_qualname(config.parallel_config.worker_cls)
        worker = worker_class(
            vllm_config=config,
            local_rank=rank,
            rank=rank,
            distributed_init_method=f"file://{model / 'rendezvous'}",
            is_driver_worker=rank == 0,
        )
        worker.init_device()
        worker.load_model()
        result.weights = int(worker.model_runner.model_memory_usage)
        result.available = int(worker.determine_available_memory())
        if scenario.kv_cache_memory_bytes is None:  # else nothing is measured
            result.peak_activation = int(worker.peak_activation_memory)
            result.non_torch = int(worker.non_torch_memory)
        plan = get_kv_cache_configs(config, [worker.get_kv_cache_spec()], [result.available])[0]
        result.num_blocks = plan.num_blocks
        before = torch.npu.memory_allocated()
        worker.initialize_from_config(plan)
        result.kv_cache = torch.npu.memory_allocated() - before
        worker.compile_or_warm_up_model()
        result.graph = int(getattr(worker, "npugraph_memory_bytes", 0))  # only there if memory was profiled
        worker.execute_dummy_batch()
    return result


def engine_config(scenario: Scenario, model: Path) -> Any:
    """Upstream's configuration of a scenario, after the platform's rules."""
    from vllm.engine.arg_utils import EngineArgs

    optional = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes",
                "num_gpu_blocks_override")  # fmt: skip
    given: dict[str, Any] = {key: getattr(scenario, key) for key in optional if getattr(scenario, key) is not None}
    xlite = scenario.xlite_graph_config
    if xlite.enabled:
        given["additional_config"] = {"xlite_graph_config": {"enabled": True, "full_mode": xlite.full_mode}}
    arguments = EngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=scenario.tensor_parallel_size,
        enable_expert_parallel=scenario.enable_expert_parallel,
        enable_chunked_prefill=scenario.enable_chunked_prefill,
        enable_prefix_caching=scenario.enable_prefix_caching,
        gpu_memory_utilization=scenario.gpu_memory_utilization,
        dtype=scenario.dtype,
        enforce_eager=scenario.enforce_eager,
        seed=scenario.seed,
        **given,
    )
    return arguments.create_engine_config()


@contextmanager
def model_directory(config: Path) -> Iterator[Path]:
    """A model as upstream wants it: a folder with ``config.json``; weights are dummies."""
    with tempfile.TemporaryDirectory(prefix="model") as folder:
        shutil.copy(config, Path(folder) / "config.json")
        yield Path(folder)


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collects the lines that upstream logs."""
    import vllm.logger  # noqa: F401 - replaces all handlers

    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    collector = Collector(logging.INFO)
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm_ascend")]
    for logger in loggers:
        logger.addHandler(collector)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(collector)


def in_child(work: Callable[[], None]) -> None:
    """Do something in a process of its own that begins with this one's imports."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def start_cases(names: Sequence[str], results: TextIO) -> None:
    """Start each case and write its result, or its error, as a line of JSON.

    Cases on one kind of device share the imports, which upstream does differently for each kind.
    """
    from importlib.metadata import version

    release = version("vllm").removesuffix("+empty")
    by_family: dict[str, list[tuple[Case, Scenario]]] = defaultdict(list)
    for case in (*CASES, *REFUSED.values()):
        if release in case.releases and (not names or case.name in names):
            scenario = load_scenario(case.scenario, case.settings)
            by_family[load_profile(scenario.device_profile).family].append((case, scenario))

    def start_one(case: Case, scenario: Scenario) -> None:
        try:
            answer = asdict(start(scenario, case.rank))
        except BaseException:  # noqa: BLE001 - whoever reads the line reports it
            answer = {"error": traceback.format_exc()}
        print(json.dumps({"case": case.name, **answer}), file=results, flush=True)

    def start_family(family: str, cases: Sequence[tuple[Case, Scenario]]) -> None:
        import_upstream(family)
        gc.collect()
        gc.freeze()  # upstream collects garbage at a dozen points, each time through everything that was imported
        for case, scenario in cases:
            in_child(partial(start_one, case, scenario))

    for family, cases in by_family.items():
        in_child(partial(start_family, family, cases))


def import_upstream(family: str) -> None:
    """Import what every start-up on a kind of device imports before anything depends on the scenario."""
    expose_doubles()
    os.environ.update(PRESETS)
    _build_for(family)
    for module in ("vllm.engine.arg_utils", "vllm.v1.core.kv_cache_utils", "vllm_ascend.xlite.xlite_worker"):
        import_module(module)
    import_module("vllm_ascend.utils").adapt_patch()  # the first thing that a worker does


def main() -> None:
    """Start one rank, or each case, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", type=Path, nargs="?")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--set", type=json.loads, default={}, help="scenario keys that replace the file's, as JSON")
    parser.add_argument("--cases", nargs="*", help="cases to start, each in a process of its own; default: all")
    options = parser.parse_args()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # upstream logs to stdout
    if options.cases is None:
        print(json.dumps(asdict(start(load_scenario(options.scenario, options.set), options.rank))), file=results)
        return
    start_cases(options.cases, results)


if __name__ == "__main__":
    main()
