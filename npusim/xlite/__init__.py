"""xlite's native side: its tensor pool, found by running the forward's allocation sequence on a first-fit arena."""

from npusim.xlite.config import (
    AttnType,
    DeviceFacts,
    Environment,
    ModelConfig,
    QuantKind,
    ScoringFuncType,
    WeightFacts,
)
from npusim.xlite.outside_pool import OutsideAllocation, When, outside_pool
from npusim.xlite.pool import PoolSize, tensor_pool_size
from npusim.xlite.rank_model import RankModel
from npusim.xlite.tensors import DType

__all__ = [
    "AttnType",
    "DType",
    "DeviceFacts",
    "Environment",
    "ModelConfig",
    "OutsideAllocation",
    "PoolSize",
    "QuantKind",
    "RankModel",
    "ScoringFuncType",
    "WeightFacts",
    "When",
    "outside_pool",
    "tensor_pool_size",
]
