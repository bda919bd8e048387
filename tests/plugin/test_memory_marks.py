"""``npu_memory``, ``npu_memory_limit`` and ``npu_leaks_nothing``: the same on either device."""

from __future__ import annotations

import pytest


def test_memory_limit(run):
    result = run(
        """
        import pytest, torch

        MIB = 1 << 20

        def block(num_mib):
            return torch.empty(num_mib * MIB, dtype=torch.uint8, device="npu")

        def model():
            return [block(32), block(32)]

        @pytest.mark.npu_memory_limit("100 MiB")
        def test_within():
            weights = model()
            del weights
            block(90)

        @pytest.mark.npu_memory_limit("100 MiB")
        def test_above():
            weights = model()
            gone = block(8)
            del gone
            scratch = block(40)
            del weights, scratch

        @pytest.mark.npu_memory_limit("1.5 GiB", of="reserved")
        def test_reserved_within():
            model()

        @pytest.mark.npu_memory_limit(2 << 20, of="reserved")
        def test_reserved_above():
            block(1)

        @pytest.mark.npu_memory_limit("1 MiB")
        def test_fails_by_itself():
            weights = model()
            assert len(weights) == 3

        @pytest.mark.npu_memory_limit("1 MiB")
        @pytest.mark.xfail(strict=True)
        def test_known_to_be_above():
            model()
        """
    )
    result.assert_outcomes(passed=2, failed=3, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "_* test_above _*",
            "npu_memory_limit: the test's peak on npu:0 is 104.00 MiB allocated, 100.00 MiB are allowed (4.00 *",
            "     64.00 MiB      2x  test_memory_limit.py:6 block < :9 model < :19 test_above",
            "     40.00 MiB      1x  test_memory_limit.py:6 block < :22 test_above",
            "_* test_reserved_above _*",
            "npu_memory_limit: the test's peak on npu:0 is * MiB reserved, 2.00 MiB are allowed *:",
            "      1.00 MiB      1x  test_memory_limit.py:6 block < :31 test_reserved_above",
            "_* test_fails_by_itself _*",
            "E *assert 2 == 3",
            "peak memory * allocated *reserved",
            " * 104.00 MiB * MiB  test_memory_limit.py::test_above",
        ]
    )


def test_leaks(run):
    result = run(
        """
        import pytest, torch

        class Cache:
            def __init__(self):
                self.entries = []

            def add(self, num_bytes):
                self.entries.append(torch.empty(num_bytes, dtype=torch.uint8, device="npu"))

        @pytest.fixture
        def cache(npu_device):
            cache = Cache()
            cache.add(256 << 10)
            return cache

        @pytest.mark.npu_leaks_nothing
        def test_clean(cache):
            cache.add(512)
            cache.entries.pop()
            cycle = [torch.empty(512, device="npu")]
            cycle.append(cycle)

        @pytest.mark.npu_leaks_nothing
        def test_dirty(cache):
            cache.add(300 << 10)
            cache.add(1024)
            cache.entries.pop(0)
            cache.add(400 << 10)
        """
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "npu_leaks_nothing: 0.44 MiB more allocated on npu:0 after the test than before it. *",
            "      0.39 MiB      1x  test_leaks.py:8 add < :28 test_dirty",
            "      0.29 MiB      1x  test_leaks.py:8 add < :25 test_dirty",
            "    1024 bytes      1x  test_leaks.py:8 add < :26 test_dirty",
        ]
    )


def test_figures(npu_memory):
    import torch

    assert npu_memory.peak_allocated_bytes == npu_memory.allocated_bytes
    before = npu_memory.allocated_bytes
    block = torch.empty(1 << 18, dtype=torch.uint8, device="npu")
    assert npu_memory.allocated_bytes - before == (1 << 18) + 512 == torch.npu.memory_allocated() - before
    del block
    assert npu_memory.allocated_bytes == before
    assert npu_memory.growth_bytes() == (1 << 18) + 512
    assert npu_memory.peak_reserved_bytes >= npu_memory.reserved_bytes >= 2 << 20
    npu_memory.reset_peak()
    assert npu_memory.growth_bytes() == 0
    assert (npu_memory.free_bytes, npu_memory.total_bytes) == torch.npu.mem_get_info()
    assert npu_memory.on(0).free_bytes == npu_memory.free_bytes


@pytest.mark.npu_settings(num_devices=2)
def test_each_device_has_its_figures(npu_memory):
    import torch

    block = torch.empty(1 << 20, dtype=torch.uint8, device="npu:1")
    assert (npu_memory.allocated_bytes, npu_memory.on(1).allocated_bytes) == (0, (1 << 20) + 512)
    del block
    assert [memory.growth_bytes() for memory in npu_memory.on_all()] == [0, (1 << 20) + 512]


def test_wrong_limits(run):
    result = run(
        """
        import pytest

        @pytest.mark.npu_memory_limit("1 GB")
        def test_unit(): pass

        @pytest.mark.npu_memory_limit(of="reserved")
        def test_no_limit(): pass

        @pytest.mark.npu_memory_limit("1 GiB", of="active")
        def test_figure(): pass

        @pytest.mark.npu_memory_limit(-1)
        def test_negative(): pass
        """
    )
    result.assert_outcomes(errors=4)
    size = "a size is a number of bytes or a text such as '600 MiB' (B, KiB, MiB, GiB), got"
    expected = "expected a limit, and of='allocated' or of='reserved'"
    result.stdout.fnmatch_lines(
        [
            f"{size} '1 GB'",
            f"npu_memory_limit(of='reserved'): {expected}",
            f"npu_memory_limit('1 GiB', of='active'): {expected}",
            f"{size} -1",
        ]
    )
