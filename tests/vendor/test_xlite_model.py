"""``xlite._C``: what the runtime takes from the device, and what ``Model.init`` and ``forward`` refuse."""

from __future__ import annotations

import re

import pytest
import torch

from npusim.device.ledger import Owner
from npusim.errors import UncomputedValueError, UnmodelledCallError

pytestmark = pytest.mark.needs("xlite_double")
MIB = 1 << 20
LAYERS, HIDDEN, HEADS, HEAD_DIM, BLOCK_SIZE, MAX_TOKENS = 2, 32, 2, 16, 16, 64


def bf16(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="npu")


def configuration(**changes):
    from xlite._C import ModelConfig

    config = ModelConfig()
    settings = {
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "n_layers": LAYERS,
        "n_dense_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": 1,
        "head_dim": HEAD_DIM,
        "intermediate_size": 64,
        "max_m": MAX_TOKENS,
        "max_batch_size": 4,
        "max_seq_len": 128,
        "block_size": BLOCK_SIZE,
        "def_tp_size": 1,
        "def_dp_size": 1,
        "moe_ep_size": 1,
        "moe_tp_size": 1,
    }
    for name, value in (settings | changes).items():
        setattr(config, name, value)
    return config


def weights(num_dense: int = LAYERS, **changes):
    from xlite._C import Model

    model = Model()
    lists = {
        "attn_norm": [bf16(HIDDEN)] * LAYERS,
        "mlp_norm": [bf16(HIDDEN)] * LAYERS,
        "attn_out": [bf16(HIDDEN, HEADS * HEAD_DIM)] * LAYERS,
        "mha_qkv": [bf16((HEADS + 2) * HEAD_DIM, HIDDEN)] * LAYERS,
        "mlp_up_gate": [bf16(128, HIDDEN)] * num_dense,
        "mlp_down": [bf16(HIDDEN, 64)] * num_dense,
    }
    model.embed, model.norm, model.head = bf16(64, HIDDEN), bf16(HIDDEN), bf16(64, HIDDEN)
    for name, value in (lists | changes).items():
        setattr(model, name, value)
    return model


def ready(pool_mb: int = 100, **changes):
    from xlite._C import Runtime

    model, runtime = weights(), Runtime(0)
    model.init(configuration(**changes))
    if pool_mb:
        runtime.init_tensor_pool(pool_mb)
    return model, runtime


def kv_cache(num_layers: int = LAYERS, *, num_tensors: int = 2, block_size: int = BLOCK_SIZE, heads: int = 1):
    return [[bf16(8, block_size, heads, HEAD_DIM) for _ in range(num_tensors)] for _ in range(num_layers)]


def metadata(lens=(4, 2), cached_lens=(0, 20), block_tables=((0,), (1, 2))):
    from xlite._C import AttnMeta

    meta = AttnMeta()
    meta.lens, meta.cached_lens, meta.block_tables_cpu = lens, cached_lens, block_tables
    return meta


def forward(model, runtime, *, meta=None, caches=None, num_tokens=6, num_rows=MAX_TOKENS):
    output = bf16(num_rows, HIDDEN)
    tokens = torch.zeros(num_tokens, dtype=torch.int32, device="npu")
    caches = kv_cache() if caches is None else caches
    model.forward(runtime, tokens, metadata() if meta is None else meta, caches, bf16(128, HEAD_DIM), output)
    return output


def taken(world, owner: Owner) -> int:
    return world.cards[0].ledger.bytes_by_owner().get(owner, 0)


# ---- memory


def test_the_pool_is_taken_once(npu_world):
    from xlite._C import Runtime

    runtime = Runtime(0)
    free = torch.npu.mem_get_info()[0]
    assert runtime.init_tensor_pool(519) == 0
    assert free - torch.npu.mem_get_info()[0] == 520 * MIB  # whole pages of 2 MiB
    assert runtime.init_tensor_pool(600) == runtime.init_tensor_pool(0) == 0
    assert free - torch.npu.mem_get_info()[0] == 520 * MIB
    assert torch.npu.memory_allocated() == 0


def test_the_pool_can_be_taken_by_the_constructor(npu_world):
    from xlite._C import Runtime

    free = torch.npu.mem_get_info()[0]
    runtime = Runtime(0, 10)
    assert runtime.init_tensor_pool(0) == 0
    assert free - torch.npu.mem_get_info()[0] == 10 * MIB


def test_a_pool_that_does_not_fit(npu_world):
    from xlite._C import Runtime

    runtime, free = Runtime(0), torch.npu.mem_get_info()[0]
    with pytest.raises(RuntimeError, match=r"^XRuntime: tensor pool initialization failed$"):
        runtime.init_tensor_pool(free // MIB + 1)
    assert torch.npu.mem_get_info()[0] == free
    assert runtime.init_tensor_pool(10) == 0


def test_seed_case(npu_world):
    """Qwen3-30B-A3B with TP2 and EP2: the log of the published run says 519 MB."""
    from xlite._C import Model

    layers, experts = 48, 64
    model = Model()
    size = {"hidden_size": 2048, "n_heads": 32, "n_kv_heads": 4, "head_dim": 128}
    model.embed = bf16(1, 2048)
    for name in ("attn_norm", "mlp_norm", "attn_out", "mha_qkv", "mha_q_norm", "mha_k_norm", "gate"):
        setattr(model, name, [bf16(1)] * layers)
    model.re_up_gate = [bf16(1)] * layers * experts
    model.re_down = [bf16(1)] * layers * experts
    routing = {"n_routed_experts": 128, "n_act_experts": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    capacity = {"max_m": 8192, "max_batch_size": 64, "max_seq_len": 40960, "block_size": 128}
    parallel = {"def_tp_size": 2, "moe_ep_size": 2}
    model.init(
        configuration(n_layers=layers, n_dense_layers=0, qk_norm=True, **size, **routing, **capacity, **parallel)
    )
    assert model.get_tensor_pool_size() == 519


@pytest.mark.needs("ledger")
def test_tables_are_taken_by_init_and_by_the_first_forward(npu_world):
    model, runtime = ready()
    before = taken(npu_world, Owner.XLITE_TABLES)
    forward(model, runtime)
    after = taken(npu_world, Owner.XLITE_TABLES)
    assert after > before
    forward(model, runtime)
    assert taken(npu_world, Owner.XLITE_TABLES) == after


@pytest.mark.sim_only("a card tells no uncomputed number from others")
def test_forward_overwrites_the_first_rows(npu_world):
    model, runtime = ready()
    output = torch.zeros(MAX_TOKENS, HIDDEN, dtype=torch.bfloat16, device="npu")
    tokens = torch.zeros(6, dtype=torch.int32, device="npu")
    assert model.forward(runtime, tokens, metadata(), kv_cache(), bf16(128, HEAD_DIM), output, 0) is None
    assert output[6:].sum().item() == 0
    with pytest.raises(UncomputedValueError):
        output[5].sum().item()


def test_forward_of_embeddings(npu_world):
    model, runtime = ready()
    output = bf16(MAX_TOKENS, HIDDEN)
    embeds = bf16(6, HIDDEN)
    model.forward_with_inputs_embeds(runtime, embeds, metadata(), kv_cache(), bf16(128, HEAD_DIM), output)


def test_a_pool_that_is_too_small(npu_world):
    model, runtime = ready(pool_mb=1)
    long = metadata(lens=(64,), cached_lens=(64,), block_tables=(range(8),))
    with pytest.raises(RuntimeError, match="no free tensor"):
        forward(model, runtime, meta=long, num_tokens=64)


def test_no_tokens_nothing_happens(npu_world):
    model, runtime = ready(pool_mb=0)
    forward(model, runtime, num_tokens=0)


# ---- refusals of init


@pytest.mark.parametrize(
    ("changes", "lists", "message"),
    [
        ({"n_dense_layers": 3}, {}, "num of layers must be greater than or equal to num of dense layers"),
        (
            {"n_routed_experts": 5, "moe_ep_size": 2},
            {},
            "num of routed experts must be divisible by moe expert parallel size",
        ),
        ({"n_heads": 3, "def_tp_size": 2}, {}, "nHeads must be divisible by defTpSize and defTpSize > 0"),
        (
            {},
            {"attn_norm": []},
            "Mismatched number of layers attention norm or attention out or mlp norm parameters",
        ),
        ({}, {"mha_qkv": []}, "Mismatched number of layers MHA attention QKV parameters"),
        ({"qkv_bias": True}, {}, "Mismatched number of layers MHA attention QKV bias parameters"),
        ({"qk_norm": True}, {}, "Mismatched number of layers MHA attention Q/K norm parameters"),
        ({}, {"mlp_down": []}, "Mismatched number of dense layers up gate or down parameters"),
        (
            {"n_dense_layers": 1, "n_routed_experts": 4},
            {"num_dense": 1},
            "Mismatched number of routed experts up gate or down parameters",
        ),
    ],
)
def test_init_refuses(npu_world, changes, lists, message):
    model = weights(**lists)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model.init(configuration(**changes))


def moe_lists(num_experts: int) -> dict[str, list[torch.Tensor]]:
    return {"re_up_gate": [bf16(1)] * num_experts, "re_down": [bf16(1)] * num_experts}


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ({}, "gate", "moe layers gate"),
        ({"scoring_func": 1}, "gate_bias", "moe layers gate bias"),
        ({"n_shared_experts": 1}, "se_down", "moe layers with shared experts"),
    ],
)
def test_init_refuses_moe_layers_without(npu_world, changes, name, text):
    from xlite._C import ScoringFuncType

    if "scoring_func" in changes:
        changes = {"scoring_func": ScoringFuncType(changes["scoring_func"])}
    lists = {"gate": [bf16(1)], "gate_bias": [bf16(1)], "se_up_gate": [bf16(1)], "se_down": [bf16(1)], **moe_lists(4)}
    model = weights(num_dense=1, **(lists | {name: []}))
    with pytest.raises(ValueError, match=f"^Mismatched number of {text} parameters$"):
        model.init(
            configuration(n_dense_layers=1, n_routed_experts=4, n_act_experts=2, moe_intermediate_size=8, **changes)
        )


def test_int8_weights_need_their_scales(npu_world):
    model = weights(mlp_down=[torch.empty(HIDDEN, 64, dtype=torch.int8, device="npu")] * LAYERS)
    with pytest.raises(ValueError, match="invalid matmul weights"):
        model.init(configuration())


def test_sizes_that_the_library_divides_by(npu_world):
    with pytest.raises(RuntimeError, match="def_tp_size and moe_ep_size must not be 0"):
        weights().init(configuration(moe_ep_size=0))


@pytest.mark.parametrize("call", [lambda model: model.get_tensor_pool_size(), lambda model: forward(model, ready()[1])])
def test_a_model_without_init(npu_world, call):
    with pytest.raises(RuntimeError, match=r"xlite\._C\.Model\.init was not called"):
        call(weights())


# ---- refusals of forward


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": 5}, "Forward: input's size 0 > output's size 0"),
        ({"caches": 1}, "Forward: check kv cache failed!"),
        ({"caches": 1, "num_rows": 5}, "Forward: check kv cache failed!"),
        (
            {"meta": {"lens": (), "cached_lens": ()}},
            "runtime.cpp:389: invalid attnMeta batched tokens(0) > maxBatchedTokens(64)",
        ),
        (
            {"meta": {"lens": (65,), "cached_lens": (0,)}},
            "runtime.cpp:389: invalid attnMeta batched tokens(65) > maxBatchedTokens(64)",
        ),
        ({"meta": {"block_tables": ((0,),)}}, "model.cpp: invalid blocktable(1), expected 2"),
        ({"meta": {"block_tables": ((0,), (1,))}}, "model.cpp: block table too small (1), expected 2"),
    ],
)
def test_forward_refuses(npu_world, arguments, message):
    model, runtime = ready()
    arguments = dict(arguments)
    if "caches" in arguments:
        arguments["caches"] = kv_cache(arguments["caches"])
    if "meta" in arguments:
        arguments["meta"] = metadata(**arguments["meta"])
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        forward(model, runtime, **arguments)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_tensors": 3}, "Forward: check kv cache failed at layer 0"),
        ({"block_size": 8}, "model.cpp: kv cache's shape not match [block_num, block_size, kv_head_num, head_size]"),
        ({"heads": 2}, "model.cpp: kv cache's shape not match [block_num, block_size, kv_head_num, head_size]"),
    ],
)
def test_forward_refuses_kv_caches(npu_world, shape, message):
    model, runtime = ready()
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        forward(model, runtime, caches=kv_cache(**shape))


def test_kv_caches_of_more_layers_are_taken(npu_world):
    """Upstream registers all of its caches, a drafter's behind the model's."""
    model, runtime = ready()
    forward(model, runtime, caches=kv_cache(3))


def test_forward_needs_a_pool(npu_world):
    model, runtime = ready(pool_mb=0)
    with pytest.raises(RuntimeError, match=r"^model\.cpp: xlite runtime not inited$"):
        forward(model, runtime)


def test_runtime_and_model_must_agree(npu_world):
    from xlite._C import Runtime

    model, _ = ready()
    for other in (Runtime(0, 100, 1), Runtime(0, 100, 0, 2), Runtime(0, 100, 0, 1, 2)):
        with pytest.raises(RuntimeError, match=r"^model\.cpp: check runtime communication setting failed$"):
            forward(model, other)


def test_forward_takes_xlites_objects_only(npu_world):
    model, runtime = ready()
    for arguments in ((model, None, metadata()), (model, runtime, {})):
        with pytest.raises(TypeError, match=re.escape("forward(): incompatible function arguments.")):
            forward(arguments[0], arguments[1], meta=arguments[2])


@pytest.mark.sim_only("what is not modelled")
@pytest.mark.npu_settings(values="real", environment={})
def test_forward_of_embeddings_computes_no_values(npu_world):
    model, runtime = ready()
    message = r"^xlite\._C\.Model\.forward computes no values with embeddings as input"
    with pytest.raises(UnmodelledCallError, match=message):
        model.forward_with_inputs_embeds(
            runtime, bf16(6, HIDDEN), metadata(), kv_cache(), bf16(128, HEAD_DIM), bf16(MAX_TOKENS, HIDDEN)
        )


# ---- time


@pytest.mark.sim_only("virtual time")
def test_a_forward_occupies_the_current_stream_as_long_as_its_batch_takes(npu_world):
    model, runtime = ready()
    begin, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    taken = []
    for cached_lens in ((0, 20), (0, 40)):
        meta = metadata(cached_lens=cached_lens, block_tables=((0,), (1, 2, 3)))
        caches, output = kv_cache(), bf16(MAX_TOKENS, HIDDEN)
        tokens = torch.zeros(6, dtype=torch.int32, device="npu")
        torch.npu.synchronize()
        begin.record()
        model.forward(runtime, tokens, meta, caches, bf16(128, HEAD_DIM), output)
        end.record()
        assert not end.query()
        taken.append(begin.elapsed_time(end))
    assert 0.05 < taken[0] < taken[1] < 0.2
