"""The switch between the devices, before anything is imported that would decide it."""

from __future__ import annotations

import sys

import pytest

from npusim.errors import WorldError
from npusim.installation import VENDOR_PATH, install
from npusim.testing.choice import Choice, prepare

CARD = Choice("npu", explicit=True, profile="a3-64g", seed=0)


@pytest.fixture
def fake_npu(tmp_path, monkeypatch):
    """``fake_npu(source)``: ``import torch_npu`` finds a package whose module ``npu`` is this."""
    imported = [name for name in sys.modules if name.partition(".")[0] == "torch_npu"]
    for name in imported:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def make(source: str, package: str = "from torch_npu import npu") -> None:
        (tmp_path / "torch_npu").mkdir()
        (tmp_path / "torch_npu" / "__init__.py").write_text(package)
        (tmp_path / "torch_npu" / "npu.py").write_text(source)

    yield make
    for name in ("torch_npu.npu", "torch_npu"):
        sys.modules.pop(name, None)


DRIVER_ERROR = """
def is_available(): return True
def device_count(): return 1
def mem_get_info(index): raise RuntimeError("\\naclrtGetMemInfo:NPU.cpp:1, error code is 507008\\n[Error]: ...")
"""


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "raise ImportError('libhccl.so: cannot open')",
            r"cannot be imported: libhccl\.so: .*\. Load CANN's environment",
        ),
        ("def is_available(): return False", "torch_npu sees no card; check npu-smi info and ASCEND_RT_VISIBLE"),
        (DRIVER_ERROR, "driver answers with an error: aclrtGetMemInfo.*, error code is 507008. Check npu-smi info"),
    ],
    ids=["import", "no card", "driver"],
)
def test_unusable_card(source, complaint, fake_npu):
    fake_npu(source)
    with pytest.raises(pytest.UsageError, match=f"^device npu: .*{complaint}"):
        prepare(CARD)


def test_torch_wraps_errors_of_a_backend_that_it_loads(fake_npu):
    fake_npu("", "raise RuntimeError('Failed to load the backend') from ImportError('libascendcl.so: not found')")
    with pytest.raises(pytest.UsageError, match=r"cannot be imported: libascendcl\.so: not found\. Load CANN"):
        prepare(CARD)


def test_the_double_is_no_card(fake_npu, monkeypatch):
    monkeypatch.setattr(sys, "path", [f"{VENDOR_PATH}/", *(path for path in sys.path if path != VENDOR_PATH)])
    with pytest.raises(pytest.UsageError, match=r"torch_npu is npusim's double; take .*vendor out of PYTHONPATH"):
        prepare(CARD)


def test_simulated_and_real_never_share_a_process(fake_npu):
    fake_npu("")
    import torch_npu  # noqa: F401 - stands for the real one

    with pytest.raises(pytest.UsageError, match="the real torch_npu was imported into this process, by"):
        prepare(Choice("sim", explicit=True, profile="a3-64g", seed=0))
    with pytest.raises(WorldError, match=r"^the real torch_npu \(.*\) was imported into this process, maybe by torch"):
        install(object())


@pytest.mark.sim_only("on a card the simulated device is not asked for")
def test_a_test_that_comes_too_late(alone, plugin):
    """Nobody chose a device, and the real torch_npu was there before a test asked for the simulated one."""
    alone.makepyfile(
        """
        import sys, types

        def test_late(request, monkeypatch):
            monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(__file__="/real/torch_npu/__init__.py"))
            request.getfixturevalue("npu_device")
        """
    )
    result = alone.runpytest_inprocess(*plugin)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the simulated device cannot be used: the real torch_npu was imported into this *"])
    result.stdout.no_fnmatch_line("E  *")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-o", "npusim_device=gpu"], "npusim_device should be one of sim, npu, got 'gpu'"),
        (["-o", "npusim_seed=-1"], "npusim_seed is a number from 0 to 2[*][*]64 - 1, got '-1'"),
        (["--npusim-seed=x"], "npusim_seed is a number from 0 to 2[*][*]64 - 1, got 'x'"),
        ([f"--npusim-seed={1 << 64}"], f"npusim_seed is a number from 0 to 2[*][*]64 - 1, got '{1 << 64}'"),
        (["--npusim-profile=a3-64"], "--npusim-profile: unknown device profile 'a3-64'; *did you mean 'a3-64g'?"),
        (["--npusim-replay=a3-64g"], "--npusim-replay should be PROFILE:SEED[[]:DIGEST], got 'a3-64g'"),
        (["--npusim-replay=a3-64g:0:rest"], "--npusim-replay should be PROFILE:SEED[[]:DIGEST], got 'a3-64g:0:rest'"),
        (
            ["--npusim-replay=a3-64g:0", "--npusim-device=npu"],
            "--npusim-replay repeats what a simulated device did; choose device sim for it",
        ),
        (["--npusim-record="], "--npusim-record needs the name of a folder, got ''"),
        (["--npusim-record=/dev/null/x"], "--npusim-record: cannot write to /dev/null/x: Not a directory"),
        (["--npusim-record=/proc"], "--npusim-record: cannot write to /proc: *"),
    ],
)
def test_wrong_options(arguments, complaint, alone, plugin):
    result = alone.runpytest_inprocess(*plugin, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {complaint}"])


@pytest.mark.parametrize("names", [("device_option", "pytest_plugin"), ("pytest_plugin", "device_option")])
def test_device_option_of_our_own(names, run_apart):
    """``--device`` exists where it was asked for, whichever is loaded first; without torch_npu it says what to do."""
    plugins = [argument for name in names for argument in ("-p", f"npusim.{name}")]
    result = run_apart(*plugins, "--device=npu", conftest="import sys; sys.modules['torch_npu'] = None")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: device npu needs the torch_npu package, which is not installed *pip install*"])
