"""What operators compute, against a few lines of torch on the host."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from npusim import SimWorld
from npusim.errors import CollectiveMismatchError, UncomputedValueError

pytestmark = pytest.mark.sim_only("what the simulated operators compute")

NPU = "npu:0"


@pytest.fixture
def world():
    with SimWorld("a2-64g", environment={}, values="real") as active, torch.inference_mode():
        import torch_npu  # noqa: F401

        yield active


def random(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(device_tensor, expected, tolerance=1e-5):
    torch.testing.assert_close(device_tensor.cpu().float(), expected.float(), atol=tolerance, rtol=tolerance)


# ---- layers


def rms(x, gamma, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma


def test_norms(world):
    x, residual, gamma = random(5, 16), random(5, 16, seed=1), random(16, seed=2)
    on_npu = x.to(NPU), residual.to(NPU), gamma.to(NPU)
    close(torch.ops.npu.npu_rms_norm(on_npu[0], on_npu[2])[0], rms(x, gamma))
    normed, _, total = torch.ops.npu.npu_add_rms_norm(*on_npu)
    close(total, x + residual)
    close(normed, rms(x + residual, gamma))
    close(torch.ops.npu.npu_gemma_rms_norm(on_npu[0], on_npu[2])[0], rms(x, 1 + gamma))


def test_swiglu(world):
    x = random(4, 32)
    gate, up = x.chunk(2, -1)
    close(torch.ops.npu.npu_swiglu(x.to(NPU)), functional.silu(gate) * up)


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_rotary_embedding_in_place(world, is_neox_style):
    angles = random(32, 4)
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    query, key, positions = random(3, 2 * 8), random(3, 8, seed=1), torch.tensor([4, 0, 31])
    on_npu = query.to(NPU), key.to(NPU)
    torch.ops.atb._npu_rotary_embedding(positions.to(NPU), *on_npu, 8, cache.to(NPU), is_neox_style)

    def turned(x):
        heads = x.view(3, -1, 8)
        a, b = heads.chunk(2, -1) if is_neox_style else (heads[..., ::2], heads[..., 1::2])
        cos, sin = (part[positions][:, None] for part in (angles.cos(), angles.sin()))
        pair = a * cos - b * sin, b * cos + a * sin
        return (torch.cat(pair, -1) if is_neox_style else torch.stack(pair, -1)).reshape(x.shape)

    close(on_npu[0], turned(query))
    close(on_npu[1], turned(key))


def test_quantised_product(world):
    x, weight, scale = random(4, 32), random(32, 8, seed=1), torch.rand(8) / 100
    rows, row_scale = torch.ops.npu.npu_dynamic_quant(x.half().to(NPU))
    close(rows.cpu().float() * row_scale.cpu()[:, None], x, 0.05)
    integers = (weight * 40).round().to(torch.int8)
    product = torch.ops.npu.npu_quant_matmul(
        rows, integers.to(NPU), scale.to(NPU), pertoken_scale=row_scale, output_dtype=torch.bfloat16
    )
    expected = (rows.cpu().float() @ integers.float()) * scale * row_scale.cpu()[:, None]
    close(product, expected.bfloat16(), 0.01)


# ---- attention


def pages(tensor, block_table, block_size):
    """[tokens, heads, size] of one sequence into a paged cache."""
    cache = torch.zeros(8, block_size, *tensor.shape[1:])
    for position, row in enumerate(tensor):
        cache[block_table[position // block_size], position % block_size] = row
    return cache


def plain_attention(query, key, value):
    """Causal attention of the last queries of a sequence; [tokens, heads, size]."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
    mask = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]).bool()
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)


def test_fused_attention_over_pages(world):
    query, key, value = random(3, 4, 16), random(11, 2, 16, seed=1), random(11, 2, 16, seed=2)
    table = [5, 2, 7]
    caches = [pages(tensor, table, 4).view(8, 4, -1).to(NPU) for tensor in (key, value)]
    mask = torch.ones(2048, 2048).triu(1).to(torch.int8)
    result, _ = torch.ops.npu.npu_fused_infer_attention_score(
        query.to(NPU),
        *caches,
        atten_mask=mask.to(NPU),
        block_table=torch.tensor([table], dtype=torch.int32).to(NPU),
        actual_seq_lengths=[3],
        actual_seq_lengths_kv=[11],
        num_heads=4,
        num_key_value_heads=2,
        scale=0.25,
        input_layout="TND",
        block_size=4,
        sparse_mode=3,
    )
    close(result, plain_attention(query, key, value))


def test_write_to_the_cache_and_attend(world):
    query, key, value = random(1, 4, 16), random(6, 2, 16, seed=1), random(6, 2, 16, seed=2)
    caches = [torch.zeros(8, 4, 2, 16).to(NPU) for _ in range(2)]
    slots = torch.tensor([20, 21, 22, 23, 8, 9], dtype=torch.int32).to(NPU)  # pages 5 and 2
    torch.ops.atb._npu_reshape_and_cache(key.to(NPU), value.to(NPU), *caches, slots)
    result = torch.empty_like(query, device=NPU)
    torch.ops.atb._npu_paged_attention(
        query.to(NPU),
        *caches,
        2,
        4,
        0.25,
        torch.tensor([[5, 2]], dtype=torch.int32).to(NPU),
        torch.tensor([6], dtype=torch.int32),
        result,
    )
    close(result, plain_attention(query, key, value))


# ---- mixture of experts


def test_permuted_tokens_come_back(world):
    x, experts, weights = random(5, 8), torch.tensor([[0, 2], [1, 0], [3, 1], [2, 3], [0, 1]]), torch.rand(5, 2)
    rows, places = torch.ops.npu.npu_moe_token_permute(x.to(NPU), experts.to(NPU))
    by_expert = experts.flatten().argsort(stable=True)
    close(rows, x[by_expert // 2])
    back = torch.ops.npu.npu_moe_token_unpermute(rows, places, probs=weights.to(NPU))
    close(back, x * weights.sum(1, keepdim=True))


def test_routed_rows_through_grouped_products(world):
    x, weights = random(6, 8), random(4, 8, 3, seed=1)
    experts = torch.tensor([[0, 3], [1, 3], [2, 0], [3, 1], [0, 2], [1, 0]], dtype=torch.int32)
    rows, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x.to(NPU),
        experts.to(NPU),
        active_num=12,
        expert_num=4,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, 4],
        quant_mode=-1,
    )
    (products,) = torch.ops.npu.npu_grouped_matmul(
        [rows], [weights.to(NPU)], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )
    assert counts.tolist() == [4, 3, 2, 3]
    by_token = products.cpu()[places.cpu().long()].view(6, 2, 3)
    expected = torch.stack([torch.stack([x[t] @ weights[e] for e in experts[t]]) for t in range(6)])
    close(by_token, expected)


def on_two_ranks(body, **settings):
    """``body(rank, name of the group, device)`` on two simulated ranks; their results."""
    store = dist.HashStore()

    def main(rank):
        device = torch.device("npu", rank)
        torch.npu.set_device(device)
        dist.init_process_group("hccl", store=store, rank=rank, world_size=2)
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
        return body(rank, backend.get_hccl_comm_name(rank), device)

    with SimWorld("a3-64g", num_devices=2, environment={}, values="real", **settings) as active:
        return active.run_ranks([lambda rank=rank: main(rank) for rank in range(2)])


def test_tokens_go_to_their_experts_ranks_and_back():
    xs = [random(3, 8, dtype=torch.bfloat16), random(3, 8, seed=1, dtype=torch.bfloat16)]
    experts = torch.tensor([[0, 3], [1, 2], [3, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])

    def body(rank, group, device):
        shared = {"group_ep": group, "ep_world_size": 2, "ep_rank_id": rank, "moe_expert_num": 4, "global_bs": 6}
        arrived, _, assist, counts, received, *_ = torch.ops.npu.npu_moe_distribute_dispatch_v2(
            xs[rank].to(device), experts.to(device), shared_expert_num=1, **shared
        )
        num_rows = int(counts.cpu().sum())
        scale = torch.tensor([2.0 if row < int(counts.cpu()[0]) else 3.0 for row in range(len(arrived))])
        result = torch.ops.npu.npu_moe_distribute_combine_v2(
            arrived * scale.bfloat16().to(device)[:, None],
            experts.to(device),
            assist,
            received,
            weights.to(device),
            **shared,
        )
        return num_rows, result.cpu()

    (first, first_result), (second, second_result) = on_two_ranks(body)
    assert (first, second) == (4, 8)  # entries of experts 0 and 1, and of 2 and 3, of both ranks
    factors = torch.tensor([2.0, 3.0, 2.0, 3.0])[experts.long()]  # each rank's first expert doubles
    for x, result in zip(xs, (first_result, second_result), strict=True):
        close(result, x * (weights * factors).sum(1, keepdim=True), 0.02)


def test_product_summed_over_ranks():
    xs, weights = [random(4, 8), random(4, 8, seed=1)], [random(8, 3, seed=2), random(8, 3, seed=3)]
    expected = xs[0] @ weights[0] + xs[1] @ weights[1]

    def body(rank, group, device):
        given = xs[rank].to(device), weights[rank].to(device), group
        part = torch.ops.npu.npu_mm_reduce_scatter_base(*given, 2)
        return torch.ops.npu.npu_mm_all_reduce_base(*given).cpu(), part.cpu()

    for rank, (total, part) in enumerate(on_two_ranks(body)):
        close(total, expected)
        close(part, expected[2 * rank : 2 * rank + 2])


def test_a_missing_rank_is_noticed():
    def body(rank, group, device):
        if rank == 0:
            given = torch.zeros(2, 4, device=device), torch.zeros(4, 2, device=device)
            torch.ops.npu.npu_mm_all_reduce_base(*given, group)

    with pytest.raises(CollectiveMismatchError, match="mm_all_reduce"):
        on_two_ranks(body)


# ---- selection and random numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("descending", [True, False])
def test_sorting(world, dtype, descending):
    x = (random(3, 50) * 4).to(dtype)  # with equal numbers among them
    values, places = x.to(NPU).sort(dim=-1, descending=descending, stable=True)
    expected, expected_places = x.sort(dim=-1, descending=descending, stable=True)
    assert torch.equal(values.cpu(), expected)
    assert torch.equal(places.cpu(), expected_places)
    assert torch.equal(x.to(NPU).topk(5).values.cpu(), x.topk(5).values)


def test_subscripts_by_masks_and_by_host_indices(world):
    x = random(4, 6)
    on_npu = x.to(NPU)
    close(on_npu[on_npu > 0], x[x > 0])
    close(on_npu[torch.tensor([2, 0])], x[[2, 0]])
    on_npu[torch.tensor([1, 3]).int()] = 7.0
    x[[1, 3]] = 7.0
    close(on_npu, x)


def draws():
    return [
        torch.empty(1000, device=NPU).uniform_(),
        torch.empty(1000, device=NPU).normal_(2, 0.5),
        torch.empty(1000, device=NPU).exponential_(),
        torch.randint(3, 9, (1000,), device=NPU),
    ]


def test_random_numbers_follow_the_seed(world):
    torch.npu.manual_seed(3)
    first = [tensor.cpu() for tensor in draws()]
    others = [tensor.cpu() for tensor in draws()]
    torch.npu.manual_seed(3)
    again = [tensor.cpu() for tensor in draws()]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, others, strict=True))
    uniform, normal, exponential, integers = first
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert normal.mean().item() == pytest.approx(2, abs=0.1)
    assert exponential.mean().item() == pytest.approx(1, abs=0.15)
    assert set(integers.tolist()) == {3, 4, 5, 6, 7, 8}


def test_a_draw_that_nobody_reads_changes_nothing(world):
    torch.npu.manual_seed(3)
    torch.empty(10, device=NPU).uniform_()
    read_second = torch.empty(10, device=NPU).uniform_().cpu()
    torch.npu.manual_seed(3)
    torch.empty(10, device=NPU).uniform_().cpu()
    assert torch.equal(torch.empty(10, device=NPU).uniform_().cpu(), read_second)


# ---- what is not computed


def test_an_operator_without_numbers_says_so():
    with SimWorld("a2-64g", environment={}) as active, torch.inference_mode():
        import torch_npu  # noqa: F401

        query, key = torch.zeros(1, 2, 4, 8, device=NPU), torch.zeros(1, 2, 1, 8, device=NPU)
        indices, _ = torch.ops.npu.npu_lightning_indexer(query, key, torch.zeros(1, 2, 4, device=NPU), sparse_count=16)
        with pytest.raises(UncomputedValueError):
            indices.cpu()
        assert active.runtimes[0].allocator.memory_allocated > 0


def test_a_result_that_nobody_reads_keeps_no_memory():
    with SimWorld("a2-64g", environment={}) as active, torch.inference_mode():
        import torch_npu  # noqa: F401

        allocator = active.runtimes[0].allocator
        x = torch.zeros(1024, 1024, device=NPU)
        held = weakref.ref(x.untyped_storage())
        results = [x + 1, x.cumsum(0), torch.nn.functional.silu(x), x.sort().values, x[:4].clone(), x.roll(1)]
        kept = sum(result.untyped_storage().nbytes() for result in results)
        del x
        gc.collect()
        assert held() is None
        assert allocator.memory_allocated <= kept + 512 * len(results) + 8 * 1024 * 1024


# ---- workspaces


@pytest.mark.parametrize("level", ["1", "2"])
def test_a_custom_operator_takes_its_workspace_from_the_caching_allocator(level):
    with SimWorld("a2-64g", environment={"TASK_QUEUE_ENABLE": level}) as active, torch.inference_mode():
        import torch_npu  # noqa: F401

        allocator = active.runtimes[0].allocator
        x, gamma = torch.zeros(4, 64, device=NPU), torch.zeros(64, device=NPU)
        before = allocator.memory_reserved
        allocator.reset_peak_memory_stats()
        torch.ops._C_ascend.npu_add_rms_norm_bias(x, x, gamma, None, 1e-6)
        assert allocator.max_memory_reserved - before >= 16 * 1024 * 1024
