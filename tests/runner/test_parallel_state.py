"""Process groups: kinds, order, ranks and buffer sizes as vllm 0.22.1 with vllm-ascend 0.22.1rc1 makes them."""

from __future__ import annotations

import pytest

from xlite_runner.config import ParallelConfig
from xlite_runner.parallel_state import group_specs

# Recorded from upstream's calls of torch.distributed.new_group.
TP2_EP = {
    "world": ([[0, 1]], 200),
    "tp": ([[0, 1]], 200),
    "dcp": ([[0], [1]], 200),
    "pcp": ([[0], [1]], 200),
    "pp": ([[0], [1]], 200),
    "dp": ([[0], [1]], 50),
    "ep": ([[0, 1]], 200),
    "mc2": ([[0, 1]], None),
}
TP2_DP2_EP = {
    "world": ([[0, 1, 2, 3]], 200),
    "tp": ([[0, 1], [2, 3]], 200),
    "dcp": ([[0], [1], [2], [3]], 200),
    "pcp": ([[0], [1], [2], [3]], 200),
    "pp": ([[0], [1], [2], [3]], 200),
    "dp": ([[0, 2], [1, 3]], 50),
    "ep": ([[0, 1, 2, 3]], 200),
    "mc2": ([[0, 1, 2, 3]], None),
}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, TP2_EP),
        ({"tensor_parallel_size": 2}, TP2_EP),  # the ep group exists whether or not experts are spread
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}, TP2_DP2_EP),
    ],
)
def test_groups_of_a_mixture_of_experts_model(sizes, expected):
    specs = group_specs(ParallelConfig(**sizes), is_moe=True)
    found = {spec.name: ([list(ranks) for ranks in spec.rank_lists], spec.buffer_size_mb) for spec in specs}
    assert list(found.items()) == list(expected.items())


def test_a_dense_model_has_no_ep_group_but_an_mc2_group():
    specs = group_specs(ParallelConfig(tensor_parallel_size=2), is_moe=False)
    assert [spec.name for spec in specs] == ["world", "tp", "dcp", "pcp", "pp", "dp", "mc2"]


def test_every_rank_is_in_exactly_one_group_of_each_kind():
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=3)
    for spec in group_specs(parallel, is_moe=True):
        assert sorted(rank for ranks in spec.rank_lists for rank in ranks) == list(range(12)), spec.name


def test_ranks_count_tensor_then_pipeline_then_data_parallel():
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    groups = {spec.name: spec.rank_lists for spec in group_specs(parallel, is_moe=True)}
    assert groups["pp"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups["dp"] == ((0, 4), (2, 6), (1, 5), (3, 7))
    assert groups["ep"] == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_independent_replicas_have_groups_of_their_own():
    parallel = ParallelConfig(tensor_parallel_size=2, num_independent_replicas=2)
    groups = {spec.name: spec.rank_lists for spec in group_specs(parallel, is_moe=False)}
    pairs, singles = ((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))
    assert groups == dict.fromkeys(("world", "tp", "mc2"), pairs) | dict.fromkeys(("dcp", "pcp", "pp", "dp"), singles)
