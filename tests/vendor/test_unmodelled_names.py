"""Names of the vendor's packages that the doubles do not have: an error that names them, never a stand-in."""

from __future__ import annotations

import importlib

import pytest
import torch

MODULES = ["torch_npu", "torch_npu.npu", "torch_npu.npu.memory", "torch_npu._C", "xlite._C"]


@pytest.mark.parametrize("name", MODULES)
def test_unknown_names(npu_world, name):
    module = pytest.importorskip(name)
    assert not hasattr(module, "no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = module.no_such_thing


@pytest.mark.sim_only("names that the real package has")
@pytest.mark.parametrize(
    ("module", "name", "shown"),
    [
        ("torch_npu.npu", "set_dump", "torch.npu.set_dump"),
        ("torch_npu.npu.memory", "_save_segment_usage", "torch.npu.memory._save_segment_usage"),
        ("torch_npu", "npu_no_such_operator", "torch_npu.npu_no_such_operator"),
        ("torch_npu", "erase_stream", "torch_npu.erase_stream"),
        ("xlite._C", "matmul", "xlite._C.matmul"),
    ],
)
def test_names_that_are_not_modelled(npu_world, module, name, shown):
    from npusim.errors import UnmodelledCallError, UnmodelledNameError

    module = importlib.import_module(module)
    assert not hasattr(module, name)
    with pytest.raises(UnmodelledNameError, match=f"^{shown} is not modelled on the simulated device") as caught:
        getattr(module, name)
    assert isinstance(caught.value, UnmodelledCallError)
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.sim_only("what is modelled")
def test_every_public_name_of_torch_npu_npu_exists(npu_world):
    for name in torch.npu.__all__:
        assert hasattr(torch.npu, name), name


@pytest.mark.sim_only("operators that are not modelled")
def test_unknown_operators(npu_world):
    from npusim.errors import UnmodelledCallError

    library = torch.library.Library("npusim_test", "DEF")
    library.define("nothing(Tensor x) -> Tensor")
    with pytest.raises(UnmodelledCallError, match=r"^operator npusim_test::nothing is not modelled"):
        torch.ops.npusim_test.nothing(torch.ones(1, device="npu"))


@pytest.mark.sim_only("collectives that are not modelled")
def test_unmodelled_collectives(npu_world):
    import torch.distributed as dist

    from npusim.errors import UnmodelledCallError

    dist.init_process_group("hccl", rank=0, world_size=1, store=dist.HashStore())
    with pytest.raises(UnmodelledCallError, match=r"^ProcessGroupHCCL\.scatter is not modelled on the"):
        dist.scatter(torch.ones(1, device="npu"), [torch.ones(1, device="npu")], 0)


@pytest.mark.sim_only("formats that are not modelled")
def test_unmodelled_settings(npu_world):
    from npusim.errors import UnmodelledCallError

    torch.npu.config.allow_internal_format = True
    with pytest.raises(UnmodelledCallError, match=r"torch\.npu\.config\.no_such_setting is not modelled"):
        torch.npu.config.no_such_setting = 1
