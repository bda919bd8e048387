"""Markers and fixtures that choose what a test runs on, the terminal's section, JUnit, replay."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

SIM_ONLY = pytest.mark.sim_only("about the simulated device's own settings")


@SIM_ONLY
def test_sides_and_capabilities(run):
    result = run(
        """
        import pytest

        @pytest.mark.sim_only("computes in virtual time")
        def test_sim(npu_world):
            assert npu_world.profile.name == "a3-64g"

        @pytest.mark.npu_only("measures real time")
        def test_npu(npu_world): raise AssertionError

        @pytest.mark.npu_only("measures real time")
        def test_npu_too(): raise AssertionError

        @pytest.mark.needs("faults", "values")
        @pytest.mark.needs("graphs")
        def test_lacks(): raise AssertionError

        @pytest.mark.needs("faults", "weights")
        def test_has(npu_device):
            import torch
            assert torch.empty(3, device=npu_device).device == torch.device("npu:0")
        """,
        "-rs",
        conftest="""
        def pytest_npusim_capabilities(config):
            return {"graphs": "no graphs yet", "weights": None}
        """,
    )
    result.assert_outcomes(passed=2, skipped=3)
    result.stdout.fnmatch_lines(
        [
            "npusim-*: device=sim profile=a3-64g seed=0 replay=a3-64g:0 torch=*",
            "=* npusim: device sim =*",
            "shared tests: 1 (and 1 skipped)  sim only: 1  npu only: 0 (and 2 skipped)",
            "of the shared tests 50.0% ran here",
            "skipped 2: npu_only: measures real time",
            "skipped 1: needs graphs: no graphs yet",
            "event logs: 2, together ????????????",
            "SKIPPED * needs graphs: no graphs yet",
        ]
    )


WRONG = {
    'npu_only': "npu_only(): expected a reason as text",
    'sim_only(2)': "sim_only(2): expected a reason as text",
    'sim_only(why="so")': "sim_only(why='so'): expected a reason as text",
    'needs("value")': "needs: unknown capability 'value'; known are faults, * xlite; did you mean 'values'?",
    'needs(["values"])': "needs: unknown capability [[]'values']; known are faults, *",
    'needs(all=True)': "needs(all=True): expected capabilities, any of faults, *",
    'npu_memory_limit("banana")': "a size is a number of bytes or a text such as *, got 'banana'",
    'npu_leaks_nothing(3)': "npu_leaks_nothing(3): expected no arguments",
    'npu_profile("a3-64")': "unknown device profile 'a3-64'; *; did you mean 'a3-64g'?",
    'npu_profile(3)': "npu_profile(3): expected the name of a device profile",
    'npu_settings(num_devices="2")': "npu_settings(num_devices='2'): num_devices must be a whole number from 1",
    'npu_settings(seed=1 << 64)': "npu_settings(seed=18446744073709551616): seed must be a whole number from 0 to *",
    'npu_settings(2)': "npu_settings(2): expected settings by name, such as num_devices=2",
    'seed("often")': "seed('often'): expected one whole number from 0 to 2[*][*]64 - 1",
    'seed(1 << 64)': "seed(18446744073709551616): expected one whole number from 0 to 2[*][*]64 - 1",
}  # fmt: skip
WRONG_IN_THE_SIMULATION = {
    'npu_settings(nonsense=1)': "npu_settings: not an argument of npusim.SimWorld: nonsense",
    'npu_settings(total_bytes="60 GiB")': "npu_world cannot be made *: total_bytes must *, got '60 GiB'",
    'npu_settings(environment={"PYTORCH_NPU_ALLOC_CONF": "x:1"})': "npu_world cannot be made *: Unrecognized key*",
}  # fmt: skip


@pytest.mark.parametrize("wrong", [WRONG, pytest.param(WRONG_IN_THE_SIMULATION, marks=SIM_ONLY)], ids=["any", "sim"])
def test_wrong_marks(wrong, run):
    """Each is an error of its test that says what is wrong, in a line and without a traceback."""
    tests = [f"@pytest.mark.{mark}\ndef test_{number}(npu_world): pass" for number, mark in enumerate(wrong)]
    result = run("\n".join(["import pytest", *tests]))
    result.assert_outcomes(errors=len(wrong))
    result.stdout.fnmatch_lines([*wrong.values()])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*During handling*")
    result.stdout.no_fnmatch_line("E  *")


def test_arguments_of_marks_have_names(run):
    run(
        """
        import pytest

        @pytest.mark.sim_only(reason="here")
        @pytest.mark.npu_only(reason="there")
        def test_skipped(): raise AssertionError

        @pytest.mark.npu_memory_limit(limit="1 MiB")
        @pytest.mark.seed(number=7)
        @pytest.mark.needs(*[])
        def test_named(npu_world):
            import torch
            assert torch.initial_seed() == 7
        """
    ).assert_outcomes(passed=1, skipped=1)


@SIM_ONLY
def test_the_world_is_made_as_markers_say(run):
    run(
        """
        import pytest, torch

        @pytest.mark.npu_profile("a2-32g")
        @pytest.mark.seed(7)
        def test_marks(npu_world):
            assert npu_world.profile.name == "a2-32g"
            assert torch.initial_seed() == torch.npu.initial_seed() == 7

        @pytest.mark.seed(8)
        @pytest.mark.npu_settings(num_devices=2, seed=9, profile="a2-64g")
        def test_settings_win(npu_world):
            assert (len(npu_world.cards), npu_world.profile.name) == (2, "a2-64g")
            assert torch.initial_seed() == torch.npu.initial_seed() == 9

        def test_options(npu_world):
            assert npu_world.profile.name == "310p-44g"
            assert torch.initial_seed() == torch.npu.initial_seed() == 5

        def test_environment_is_empty(npu_world, monkeypatch):
            assert npu_world.environment == {}
        """,
        "--npusim-profile=310p-44g",
        "--npusim-seed=5",
    ).assert_outcomes(passed=4)


@SIM_ONLY
def test_faults(run):
    run(
        """
        import pytest, torch

        MIB = 1 << 20

        @pytest.mark.npu_settings(other_processes={"neighbour": 512 * MIB})
        def test_other_processes(npu_faults):
            free = torch.npu.mem_get_info()[0]
            npu_faults.other_process(100 * MIB)
            assert torch.npu.mem_get_info()[0] == free - 100 * MIB
            npu_faults.other_process(40 * MIB)
            npu_faults.other_process(0, name="neighbour")
            assert torch.npu.mem_get_info()[0] == free - 40 * MIB + 512 * MIB

        def test_one_failure_is_tried_again(npu_faults):
            npu_faults.fail_allocations()
            torch.empty(10, device="npu")
            assert torch.npu.memory_stats()["num_alloc_retries"] == 1

        def test_out_of_memory(npu_faults):
            npu_faults.fail_allocations(3, after=1)
            first = torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
            with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory. Tried to allocate 32.00 MiB"):
                torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
            third = torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
        """
    ).assert_outcomes(passed=3)


@SIM_ONLY
def test_junit(run, pytester):
    run(
        """
        import pytest

        def test_device(npu_device, npu_memory): pass

        @pytest.mark.npu_only("real")
        def test_skipped(): pass

        def test_other(): pass
        """,
        "--junitxml=report.xml",
    )
    cases = ElementTree.parse(pytester.path / "report.xml").iter("testcase")
    properties = {
        case.get("name"): {entry.get("name"): entry.get("value") for entry in case.iter("property")} for case in cases
    }
    assert properties.pop("test_skipped") == {"npusim_skipped": "npu_only: real"}
    assert properties.pop("test_other") == {}
    shown = properties.pop("test_device")
    assert re.fullmatch("[0-9a-f]{64}", shown.pop("npusim_event_log"))
    assert shown == {
        "npusim_device": "sim",
        "npusim_profile": "a3-64g",
        "npusim_peak_allocated_bytes": "0",
        "npusim_peak_reserved_bytes": "0",
    }


REPLAYED = """
import torch

def test_fails(npu_world):
    x = torch.empty({num_elements}, device="npu")
    assert torch.initial_seed() == 1
"""


@SIM_ONLY
def test_replay(run):
    failed = run(REPLAYED.format(num_elements=1000), "--npusim-seed=3", "--npusim-profile=a2-64g")
    failed.stdout.fnmatch_lines(
        ["-* npusim replay -*", "pytest 'test_replay.py::test_fails' --npusim-replay=a2-64g:3:*"]
    )
    token = re.search(r"--npusim-replay=(\S+)", failed.stdout.str())[1]
    # the same seed, so it fails alike; with the wish fulfilled it passes, since the event log is the same
    assert run(REPLAYED.format(num_elements=1000), f"--npusim-replay={token}").ret == pytest.ExitCode.TESTS_FAILED
    fixed = REPLAYED.replace("== 1", "== 3")
    assert run(fixed.format(num_elements=1000), f"--npusim-replay={token}").ret == 0
    assert run(fixed.format(num_elements=1000), f"--npusim-replay={token[:-8]}").ret == 0, (
        "a part of the digest will do"
    )
    changed = run(fixed.format(num_elements=10_000_000), f"--npusim-replay={token}")
    changed.assert_outcomes(failed=1)
    digest = token.split(":")[2]
    changed.stdout.fnmatch_lines(
        [f"--npusim-replay: the event log is ????????????; in the run to be replayed it was {digest}"]
    )
