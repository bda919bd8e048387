"""The doubles in a process that knows nothing of npusim, and those of packages besides torch_npu."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import npusim
from npusim import hook
from npusim.__main__ import main
from npusim.errors import UnmodelledCallError, UnmodelledNameError

pytestmark = pytest.mark.sim_only("tests of the doubles")

CHILD = """
import json, os, sys, torch
assert "npusim" in sys.modules
print(json.dumps([torch.npu.get_device_name(), torch.npu.device_count(), torch.ones(3, device="npu").sum().item()]))
"""


@pytest.mark.slow
def test_run_command_and_its_children_have_devices():
    """``python -m npusim run``: the child of a shell imports torch and finds two cards of an A2."""
    words = ["sh", "-c", '"$0" -c "$1"', sys.executable, CHILD]
    command = [sys.executable, "-m", "npusim", "run", "--profile", "a2-64g", "--num-devices", "2", "--values", "real"]
    run = subprocess.run([*command, "--", *words], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == ["Ascend910B3", 2, 3.0]


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_a_number_of_devices_that_cannot_be(number, capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", f"--num-devices={number}", "--", "true"])
    assert end.value.code == 2
    assert f"expected a whole number of at least 1, got '{number}'" in capsys.readouterr().err


def test_environment_of_children_keeps_what_is_there():
    environment = hook.environment_of_children({"profile": "a2-64g"}, {"PYTHONPATH": "mine", "OTHER": "x"})
    assert environment["PYTHONPATH"].endswith(f"{os.pathsep}mine")
    assert environment["OTHER"] == "x"
    assert json.loads(environment[hook.WORLD]) == {"profile": "a2-64g"}


def test_autoload_does_nothing_unless_asked(monkeypatch):
    monkeypatch.delenv(hook.WORLD, raising=False)
    hook.autoload()


def test_autoload_leaves_an_active_world_alone(npu_world, monkeypatch):
    monkeypatch.setenv(hook.WORLD, "{}")
    hook.autoload()
    assert torch.npu.device_count() == len(npu_world.cards)


def test_install_is_a_function_also_after_its_module_was_imported():
    import npusim.installation

    assert callable(npusim.install)


@pytest.fixture
def vllm_ascend(npu_world):
    """A package of that name with nothing in it."""
    sys.modules["vllm_ascend"] = type(sys)("vllm_ascend")
    sys.modules["vllm_ascend"].__path__ = []
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]:
        del sys.modules[name]


def test_extension_of_vllm_ascend_is_found_without_being_built(vllm_ascend):
    from importlib.util import find_spec

    assert find_spec("vllm_ascend.vllm_ascend_C").origin.endswith("vllm_ascend_C.py")


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        pytest.param(profile, expected, marks=pytest.mark.npu_profile(profile))
        for profile, expected in (("a2-32g", "A2"), ("a3-64g", "A3"), ("310p-44g", "_310P"))
    ],
)
def test_vllm_ascend_is_built_for_the_world_s_devices(vllm_ascend, profile, expected):
    from importlib import import_module

    assert import_module("vllm_ascend._build_info").__device_type__ == expected


def test_operators_that_nobody_modelled_are_there_and_raise(npu_world):
    x = torch.zeros(4, device="npu")
    with pytest.raises(UnmodelledCallError, match="_C_ascend::get_masked_input_and_mask is not modelled"):
        torch.ops._C_ascend.get_masked_input_and_mask(x, 0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("acl", "init"),
        ("acl.rt", "malloc"),
        ("torch_npu.profiler", "profile"),
        ("torch_npu._C", "_npu_getDevice"),
        ("triton", "compile"),
    ],
)
def test_names_that_nobody_modelled_raise(npu_world, package, name):
    from importlib import import_module

    with pytest.raises(UnmodelledNameError, match=f"{package}.{name} is not modelled"):
        getattr(import_module(package), name)


def test_settings_that_nobody_modelled_raise(npu_world):
    torch.npu.config.allow_internal_format = True
    with pytest.raises(UnmodelledCallError, match="matmul_allow_hf32"):
        torch.npu.config.matmul_allow_hf32 = True


def triton_rope(q_ptr, k_ptr, cos_sin_ptr, pos_ptr, rope_dim, IS_NEOX_STYLE, USE_COS_SIN):  # noqa: N803
    """The arguments by name that vllm-ascend's kernel is modelled by."""


def rotated(x, cos, sin, *, is_neox):
    """A rotation by the angle whose cosines and sines are given, pair by pair."""
    out = x.clone()
    half = cos.shape[-1]
    for i in range(half):
        a, b = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
        out[..., a] = x[..., a] * cos[:, None, i] - x[..., b] * sin[:, None, i]
        out[..., b] = x[..., b] * cos[:, None, i] + x[..., a] * sin[:, None, i]
    return out


@pytest.mark.npu_settings(values="real")
@pytest.mark.parametrize("is_neox", [True, False])
def test_rotary_kernel_in_place(npu_world, is_neox):
    import triton

    kernel = triton.jit(triton_rope)
    kernel.__module__, kernel.__qualname__ = "vllm_ascend.ops.triton.rope", "_triton_rope"
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, heads, 12, generator=generator) for heads in (4, 2))
    angles = torch.randn(16, 4, generator=generator)
    positions = torch.tensor([3, 1, 4, 1, 15])
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    on_device = [tensor.to("npu") for tensor in (q, k, cache, positions)]
    before = torch.npu.memory_allocated()
    kernel[(5,)](*on_device, 8, IS_NEOX_STYLE=is_neox, USE_COS_SIN=True, num_warps=4)
    assert torch.npu.memory_allocated() == before
    cos, sin = angles[positions].cos(), angles[positions].sin()
    for source, result in zip((q, k), on_device[:2], strict=True):
        torch.testing.assert_close(result.cpu(), rotated(source, cos, sin, is_neox=is_neox))


def test_other_kernels_raise(npu_world):
    import triton

    with pytest.raises(UnmodelledCallError, match=r"Triton kernel .*triton_rope is not modelled"):
        triton.jit(triton_rope)[(1,)](1, 2, 3, 4, 5, 6, 7)


@pytest.mark.npu_settings(values="real")
def test_arguments_that_decorators_of_a_kernel_add(npu_world):
    """The first configuration's, and what follows from the others; both, and the kernel below, are found by ``fn``."""
    import triton

    kernel = triton.jit(triton_rope)
    kernel.__module__, kernel.__qualname__ = "vllm_ascend.ops.triton.rope", "_triton_rope"
    configs = [triton.Config({"IS_NEOX_STYLE": True}), triton.Config({"IS_NEOX_STYLE": False})]
    tuned = triton.autotune(configs, key=["rope_dim"])(kernel)
    decorated = triton.heuristics({"USE_COS_SIN": lambda given: given["rope_dim"] == 2})(tuned)
    assert isinstance(tuned, triton.runtime.autotuner.Autotuner)
    assert decorated.fn.fn is kernel
    q, k = torch.ones(1, 1, 2).npu(), torch.ones(1, 1, 2).npu()
    decorated[(1,)](q, k, torch.tensor([[0.0, 1.0]]).npu(), torch.zeros(1, dtype=torch.long).npu(), 2)
    assert q.flatten().tolist() == [-1.0, 1.0]


def test_names_within_triton_kernels(npu_world):
    from triton import language

    with pytest.raises(UnmodelledCallError, match=r"extra\.cann\.libdevice\.isnan was called outside of a kernel"):
        language.extra.cann.libdevice.isnan(1)


def test_names_of_newer_releases_raise_when_they_are_used(npu_world):
    from fla_npu.ops import ascendc
    from triton.experimental.gluon import language

    with pytest.raises(UnmodelledCallError, match=r"fla_npu\.ops\.ascendc\.recurrent_kda is not modelled"):
        ascendc.recurrent_kda(1, scale=2)
    with pytest.raises(UnmodelledCallError, match=r"gluon\.language\.load was called outside of a kernel"):
        language.load(1)


def test_facts_that_triton_kernels_are_launched_by(npu_world):
    from triton.runtime.driver import driver

    properties = driver.active.utils.get_device_properties(0)
    assert properties["num_vectorcore"] == torch.npu.get_device_properties(0).vector_core_num


class TestLoneRank:
    """One rank of several, whose peers do as it does."""

    @staticmethod
    def start(rank, num_ranks):
        from torch import distributed as dist

        world = npusim.SimWorld(num_devices=num_ranks, lone_rank=rank, environment={})
        with world:
            torch.npu.set_device(rank)
            dist.init_process_group("hccl", store=dist.HashStore(), rank=rank, world_size=num_ranks)
            yield dist
            dist.destroy_process_group()

    @pytest.mark.parametrize("rank", [0, 2])
    def test_peers_contribute_what_it_contributes(self, rank):
        for dist in self.start(rank, 4):
            x = torch.tensor([1, 2], device="npu")
            dist.all_reduce(x)
            assert x.tolist() == [4, 8]
            gathered = torch.empty(8, dtype=torch.int64, device="npu")
            dist.all_gather_into_tensor(gathered, x)
            assert gathered.tolist() == [4, 8] * 4
            assert torch.npu.current_device() == rank

    def test_groups_on_the_host_do_not_wait_either(self):
        for dist in self.start(1, 2):
            group = dist.new_group([0, 1], backend="gloo")
            x = torch.ones(2)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [2, 2]
            assert dist.get_backend(group) == "gloo"

    def test_other_ranks_cannot_be_run(self):
        from npusim.errors import WorldError

        with pytest.raises(WorldError, match="only rank 1, got 2 functions"):
            npusim.SimWorld(num_devices=2, lone_rank=1, environment={}).run_ranks([int, int])
