from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npusim.xlite import DeviceFacts, DType, Environment, ModelConfig, QuantKind, RankModel, WeightFacts

DATA = Path(__file__).parent.parent / "data" / "xlite_pool"

Row = dict[str, Any]


def _read_jsonl(name: str) -> list[Row]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def golden_rows() -> dict[int, Row]:
    """Configurations with the real libraries' answers, by id."""
    return {row["id"]: row for row in _read_jsonl("pool_sizes.jsonl.gz")}


@pytest.fixture(scope="session")
def golden_traces() -> dict[tuple[int, str], Row]:
    """What the real counting pools gave and took back, by id and version."""
    return {(trace["id"], trace["version"]): trace for trace in _read_jsonl("traces.jsonl.gz")}


@pytest.fixture(scope="session")
def rank_model() -> Callable[..., RankModel]:
    """Build the model of a golden row: ``rank_model(row, version, **config changes)``."""

    def build(row: Row, version: str, **changes: int) -> RankModel:
        config, weights = ModelConfig(**(row["config"] | changes)), row["weights"]
        dtype = DType[weights["dtype"].upper()]
        attn, mlp, shared = (QuantKind(weights[key]) for key in ("attn_quant", "mlp_quant", "shared_quant"))
        return RankModel(
            config=config,
            weights=WeightFacts(
                dtype=dtype,
                gate_dtype=dtype if weights["gate_dtype"] == "same" else DType.FP32,
                mha_qkv=attn,
                mla_qkv_a=attn,
                mla_q_b=attn,
                index_q_b=attn,
                attn_out=attn,
                mlp_up_gate=mlp,
                mlp_down=mlp,
                se_up_gate=shared,
                se_down=shared,
                experts_quantised=weights["expert_quant"] != "none",
                shared_width=config.moe_intermediate_size * config.n_shared_experts if weights["shared_full"] else None,
            ),
            device=DeviceFacts(num_ai_cores=row["device"]["aic"], devices_per_node=row["device"]["devices"]),
            environment=Environment.from_mapping(row["env"]),
            version=version,
            rank=row["rank"],
        )

    return build


@pytest.fixture
def seed_model(golden_rows: dict[int, Row], rank_model: Callable[..., RankModel]) -> RankModel:
    """Qwen3-30B-A3B, TP2 EP2, 8192 tokens a step, on 0.1.0rc11: the case of vllm-ascend PR #11380."""
    return rank_model(golden_rows[0], "0.1.0rc11")
