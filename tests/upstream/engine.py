"""Starts upstream's own worker, as published and unmodified, on a simulated world that a scenario describes.

One process is one rank: upstream keeps its parallel state, forward context and settings in module globals, which
several ranks of a process would share. Without a rendezvous the other ranks are taken to do as this one does
(``SimWorld(lone_rank=...)``), which is what tensor-parallel ranks do: they get the same seed, the same inputs, and call
the same collectives. With one the others are processes like this one, and collectives exchange values.

Run as a script inside an environment that has vllm and vllm-ascend; prints a line of JSON::

    python -m tests.upstream.engine examples/tiny.toml
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TextIO

from npusim.hook import environment_of_children
from npusim.world import SimWorld
from tests.upstream.cases import has_the_fix
from tests.upstream.ranks import Rendezvous
from tests.upstream.reference import write_drafter_weights, write_weights
from xlite_runner.config import ModelConfig, ProfilePolicy
from xlite_runner.config.platform import effective_environment
from xlite_runner.scenario import Scenario, load_scenario
from xlite_runner.simulation import build_world, ledgers

if TYPE_CHECKING:
    from npusim.torch_backend.values import Told
    from xlite_runner.memory_profiling import MemoryUse

PRESETS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Nothing can be compiled for the double: models run as written, and there are no piecewise graphs.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
}

LAYER_SCALE = 0.1
"""With this a drafter guesses right about as often as not."""


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
    kv_cache: int = 0
    graph: int = 0
    log_lines: list[str] = field(default_factory=list)
    ledger: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class StartedRank:
    """Upstream after its start-up, ready to serve.

    Attributes:
        world: What it runs on.
        config: Its ``VllmConfig``.
        worker: Its ``XliteWorker``, or ``NPUWorker`` without xlite.
        plan: Its ``KVCacheConfig``.
        result: What it computed.
        after_stage: What was in use after each of :data:`xlite_runner.stages.STAGES`.
    """

    world: SimWorld
    config: Any
    worker: Any
    plan: Any
    result: UpstreamResult
    after_stage: dict[str, MemoryUse]


def policy_of_installed_release() -> ProfilePolicy:
    """What the installed vllm-ascend's profile run executes in xlite full mode."""
    return ProfilePolicy.SKIP if has_the_fix(version("vllm-ascend")) else ProfilePolicy.RUNNABLE


def start(scenario: Scenario, rank: int = 0, peers: Rendezvous | None = None) -> UpstreamResult:
    """Take upstream's worker of one rank through its start-up.

    Raises:
        Exception: What upstream raises.
    """
    with started(scenario, rank, peers) as upstream:
        upstream.worker.execute_dummy_batch()
        upstream.result.ledger = [asdict(row) for row in ledgers(upstream.world)[rank]]
        return upstream.result


@contextmanager
def started(
    scenario: Scenario,
    rank: int = 0,
    peers: Rendezvous | None = None,
    *,
    values: Literal["shape", "real"] = "shape",
    told_values: Told | None = None,
    engine_args: Mapping[str, Any] | None = None,
) -> Iterator[StartedRank]:
    """Upstream's worker of one rank, after its start-up, in an active world.

    Args:
        scenario: What to start, and on which devices.
        rank: The rank that runs.
        peers: Where the other ranks are found; None: they do as this one does.
        values: Of the world.
        told_values: Of the world.
        engine_args: Settings of upstream's engine that a scenario does not have.

    Raises:
        Exception: What upstream raises.
    """
    # Not by xlite_runner's rules about models and settings, which are compared with upstream's.
    settings: Any = SimpleNamespace(seed=scenario.seed, environment=effective_environment(scenario))
    replica = Replica(scenario, rank, peers)
    world = build_world(
        scenario,
        settings,
        policy_of_installed_release(),
        lone_rank=rank,
        store=replica.store(),
        values=values,
        told_values=told_values,
    )
    child_world = {"profile": scenario.device_profile, "num_devices": scenario.num_ranks}
    # Upstream looks at model classes in a child process.
    os.environ.update(environment_of_children(child_world, {**os.environ, **PRESETS, **scenario.environment}))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(peers is not None)  # no rank has to serve torch's store
    with world, model_directory(scenario.model) as model, captured_log() as lines:
        if values == "real":
            write_weights(model, layer_scale=1.0 if scenario.num_speculative_tokens is None else LAYER_SCALE)
        vllm_config = engine_config(scenario, model, engine_args or {})
        replica.configure(vllm_config)
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(vllm_config):
            upstream = _start(scenario, model, replica, world, vllm_config)
            upstream.result.log_lines = lines
            yield upstream


def _start(scenario: Scenario, model: Path, replica: Replica, world: SimWorld, config: Any) -> StartedRank:
    import torch
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    from xlite_runner.memory_profiling import MemoryUse

    # A queue over host shared memory, by which the executor's steps reach the ranks; its readers are other processes,
    # which are not there, and nothing is sent on it during a start-up.
    MessageQueue.create_from_process_group = staticmethod(lambda *args, **kwargs: None)

    result = UpstreamResult(version("vllm-ascend"), replica.rank)
    worker_class = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    worker = worker_class(
        vllm_config=config,
        local_rank=replica.rank,
        rank=replica.rank_in_replica,
        distributed_init_method=f"file://{model / 'rendezvous'}",
        is_driver_worker=replica.rank_in_replica == 0,
    )
    after_stage: dict[str, MemoryUse] = {}

    def stage(name: str, *arguments: Any) -> Any:
        done = getattr(worker, name)(*arguments)
        after_stage[name] = MemoryUse.measure(worker.device)
        return done

    stage("init_device")
    stage("load_model")
    result.weights = int(worker.model_runner.model_memory_usage)
    spec = worker.get_kv_cache_spec()
    _resolve_kv_cache_layout(config, worker, spec)
    result.available = int(stage("determine_available_memory"))
    if scenario.kv_cache_memory_bytes is None:  # else nothing is measured
        result.peak_activation = int(worker.peak_activation_memory)
        result.non_torch = int(worker.non_torch_memory)
    # As EngineCore._initialize_kv_caches, of which there is one for each replica.
    plans = get_kv_cache_configs(config, replica.of_all_ranks(spec), replica.of_all_ranks(result.available))
    plan = plans[replica.rank_in_replica] if len(plans) > 1 else plans[0]
    if hasattr(plan, "kv_cache_layout"):
        plan.kv_cache_layout = config.cache_config.kv_cache_layout
    result.num_blocks = plan.num_blocks
    before = torch.npu.memory_allocated()
    stage("initialize_from_config", plan)
    result.kv_cache = torch.npu.memory_allocated() - before
    stage("compile_or_warm_up_model")
    result.graph = int(getattr(worker, "npugraph_memory_bytes", 0))  # only there if memory was profiled
    return StartedRank(world, config, worker, plan, result, after_stage)


@dataclass(frozen=True)
class Replica:
    """A rank's place in a data-parallel replica, which upstream runs by an engine core of its own.

    Attributes:
        scenario: How many replicas there are, of how many ranks.
        rank: Among all ranks, and number of its device.
        peers: Where the other ranks are found.
    """

    scenario: Scenario
    rank: int
    peers: Rendezvous | None

    @property
    def is_independent(self) -> bool:
        """Whether it knows nothing of other replicas: of a mixture of experts they have collectives in common."""
        return self.scenario.data_parallel_size == 1 or ModelConfig.from_hf(self.scenario.model).moe is None

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.scenario.num_ranks // self.scenario.data_parallel_size

    @property
    def index(self) -> int:
        """The replica's number."""
        return self.rank // self.num_ranks

    @property
    def rank_in_replica(self) -> int:
        """The rank's number in it."""
        return self.rank % self.num_ranks

    def store(self) -> Any:
        """What the ranks that have collectives in common share; None without peers."""
        if self.peers is None:
            return None
        return self.peers.store(f"replica {self.index}" if self.is_independent else "all")

    def configure(self, config: Any) -> None:
        """Make a configuration that of the replica, as upstream's ``EngineCoreProc.run_engine_core`` does.

        Raises:
            ValueError: Data-parallel ranks without peers.
        """
        parallel = config.parallel_config
        if parallel.data_parallel_size == 1:
            return
        if self.peers is None:
            raise ValueError("a rank alone cannot stand for data-parallel ranks, which do different things")
        parallel.data_parallel_rank_local = parallel.data_parallel_index = self.index
        if self.is_independent:
            parallel.data_parallel_size = parallel.data_parallel_size_local = 1
        else:
            parallel.data_parallel_rank = self.index
            parallel._data_parallel_master_port_list = [self.peers.port]

    def of_all_ranks(self, own: Any) -> list[Any]:
        """What each rank of the replica has; this one's alone without peers."""
        if self.peers is None or self.num_ranks == 1:
            return [own]
        from torch.distributed import all_gather_object
        from vllm.distributed.parallel_state import get_tp_group

        gathered = [None] * self.num_ranks
        all_gather_object(gathered, own, group=get_tp_group().cpu_group)
        return gathered


def _resolve_kv_cache_layout(config: Any, worker: Any, spec: Mapping[str, Any]) -> None:
    """What the engine core does before it lets workers profile, since vllm 0.30."""
    backends = import_module("vllm.v1.attention.backends.utils")
    if hasattr(backends, "resolve_kv_cache_layout"):
        supported = [worker.get_supported_kv_cache_layouts()]
        worker.set_kv_cache_layout(backends.resolve_kv_cache_layout(config, supported, list(spec.values())).name)


def engine_config(scenario: Scenario, model: Path, engine_args: Mapping[str, Any]) -> Any:
    """Upstream's configuration of a scenario, after the platform's rules; defaults are those of ``vllm serve``."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    optional = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes",
                "num_gpu_blocks_override")  # fmt: skip
    given: dict[str, Any] = {key: getattr(scenario, key) for key in optional if getattr(scenario, key) is not None}
    xlite = scenario.xlite_graph_config
    if xlite.enabled:
        given["additional_config"] = {"xlite_graph_config": {"enabled": True, "full_mode": xlite.full_mode}}
    if scenario.num_speculative_tokens is not None:
        given["speculative_config"] = mtp_config(model, scenario.num_speculative_tokens)
    arguments = EngineArgs(
        model=str(model),
        load_format="auto" if list(model.glob("*.safetensors")) else "dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=scenario.tensor_parallel_size,
        data_parallel_size=scenario.data_parallel_size,
        enable_expert_parallel=scenario.enable_expert_parallel,
        enable_chunked_prefill=scenario.enable_chunked_prefill,
        enable_prefix_caching=scenario.enable_prefix_caching,
        gpu_memory_utilization=scenario.gpu_memory_utilization,
        dtype=scenario.dtype,
        enforce_eager=scenario.enforce_eager,
        seed=scenario.seed,
        **given,
        **engine_args,
    )
    return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)


def mtp_config(model: Path, num_speculative_tokens: int) -> dict[str, Any]:
    """Upstream's setting for a Qwen2 that drafts by MiMo's module, which reads a mask and cannot be captured.

    MiMo-7B is such a model. xlite takes it under the name of a Qwen2 (``--hf-overrides``); the module is found by the
    published name, in a folder of its own here.
    """
    drafter = model / "drafter"
    drafter.mkdir()
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["MiMoForCausalLM"]
    (drafter / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if list(model.glob("*.safetensors")):
        write_drafter_weights(model, drafter)
    settings = {"method": "mtp", "model": str(drafter), "num_speculative_tokens": num_speculative_tokens}
    return settings | {"enforce_eager": True}


@contextmanager
def model_directory(config: Path) -> Iterator[Path]:
    """A model as upstream wants it: a folder with ``config.json``; without weights in it they are dummies."""
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


def import_upstream(profile: str) -> None:
    """Import what every start-up on a kind of device imports before anything depends on the scenario."""
    os.environ.update(PRESETS)
    # What a child process found out about a model's class, in 12 s of CPU; releases would overwrite each other's.
    (package,) = find_spec("vllm").submodule_search_locations
    os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(package).with_name("cache")))
    with SimWorld(profile, environment={}):
        for module in ("vllm.engine.arg_utils", "vllm.v1.core.sched.scheduler", "vllm_ascend.xlite.xlite_worker"):
            import_module(module)
        import_module("vllm_ascend.utils").adapt_patch()  # the first thing that a worker does
    gc.collect()
    gc.freeze()  # upstream collects garbage at a dozen points, each time through everything that was imported


def scenario_parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that say what to start."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--set", type=json.loads, default={}, help="scenario keys that replace the file's, as JSON")
    return parser


def stdout_for_results() -> TextIO:
    """Standard output for results alone: upstream logs to it, which goes to standard error from now on."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return results


def main() -> None:
    """Start one rank and print the result."""
    options = scenario_parser(__doc__).parse_args()
    results = stdout_for_results()
    scenario = load_scenario(options.scenario, options.set)
    import_upstream(scenario.device_profile)
    print(json.dumps(asdict(start(scenario, options.rank))), file=results)


if __name__ == "__main__":
    main()
