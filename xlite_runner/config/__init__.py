"""Configuration, from the user's settings to what every other module takes.

``model_config`` reads the model, ``engine_args`` has the user's settings, ``platform`` the rules that lead to the
effective configuration in ``runner_config``.
"""

from xlite_runner.config.engine_args import EngineArgs
from xlite_runner.config.model_config import ModelConfig, MoeConfig
from xlite_runner.config.parallel_config import ParallelConfig
from xlite_runner.config.platform import check_and_update_config
from xlite_runner.config.runner_config import (
    AscendConfig,
    CacheConfig,
    CompilationConfig,
    CUDAGraphMode,
    ProfilePolicy,
    RunnerConfig,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
    XliteGraphConfig,
)

__all__ = [
    "AscendConfig",
    "CUDAGraphMode",
    "CacheConfig",
    "CompilationConfig",
    "EngineArgs",
    "ModelConfig",
    "MoeConfig",
    "ParallelConfig",
    "ProfilePolicy",
    "RunnerConfig",
    "SchedulerConfig",
    "SchedulingPolicy",
    "SpeculativeConfig",
    "XliteGraphConfig",
    "check_and_update_config",
]
