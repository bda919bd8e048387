"""The terminal's section about the device: made of reports alone, so that it is the same with and without xdist."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

import pytest

from npusim.testing.choice import DIGEST_LENGTH

NUM_PEAKS = 10


def _reason(report: pytest.TestReport) -> str:
    """Why a test skipped itself."""
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)


class Summary:
    """Collects what the tests report about themselves.

    Args:
        device: The session's device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._sides: dict[str, str] = {}
        self._skipped: dict[str, str] = {}
        self._has_marks = False
        self._peaks: dict[str, tuple[int, int]] = {}
        self._digests: dict[str, str] = {}
        self._on_device: set[str] = set()
        self._recorded: dict[str, str] = {}
        self._not_recorded: dict[str, str] = {}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what one phase of a test reports."""
        test = report.nodeid
        self._sides[test] = next((side for side in ("sim_only", "npu_only") if side in report.keywords), "shared")
        noted = dict(report.user_properties)
        if "npusim_skipped" in noted:
            self._skipped[test] = str(noted["npusim_skipped"])
            self._has_marks = True
        elif report.skipped and not hasattr(report, "wasxfail"):
            self._skipped[test] = _reason(report)
        if "npusim_device" in noted:
            self._on_device.add(test)
        if "npusim_recorded" in noted:
            self._recorded[test] = str(noted["npusim_recorded"])
        if "npusim_not_recorded" in noted:
            self._not_recorded[test] = str(noted["npusim_not_recorded"])
        if "npusim_event_log" in noted:
            self._digests[test] = str(noted["npusim_event_log"])
        if "npusim_peak_allocated_bytes" in noted:
            allocated, reserved = noted["npusim_peak_allocated_bytes"], noted["npusim_peak_reserved_bytes"]
            assert isinstance(allocated, int)
            assert isinstance(reserved, int)
            self._peaks[test] = (allocated, reserved)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Print the section, if any test had to do with the device."""
        if not self._on_device and not self._has_marks:
            return
        terminalreporter.write_sep("=", f"npusim: device {self._device}")
        for line in self._lines(all_peaks=config.get_verbosity() > 0):
            terminalreporter.write_line(line)

    def _lines(self, *, all_peaks: bool) -> Iterator[str]:
        ran = Counter(side for test, side in self._sides.items() if test not in self._skipped)
        skipped = Counter(self._sides[test] for test in self._skipped)
        yield "  ".join(
            f"{name}: {ran[side]}" + (f" (and {skipped[side]} skipped)" if skipped[side] else "")
            for side, name in (("shared", "shared tests"), ("sim_only", "sim only"), ("npu_only", "npu only"))
        )
        if skipped["shared"]:
            yield f"of the shared tests {ran['shared'] / (ran['shared'] + skipped['shared']):.1%} ran here"
        for reason, number in sorted(Counter(self._skipped.values()).items(), key=lambda item: (-item[1], item[0])):
            yield f"skipped {number}: {reason}"
        if self._peaks:
            yield f"peak memory {'allocated':>12} {'reserved':>16}"
            peaks = sorted(self._peaks.items(), key=lambda item: (-item[1][0], item[0]))
            for test, (allocated, reserved) in peaks if all_peaks else peaks[:NUM_PEAKS]:
                yield f"{allocated / 2**20:>20,.2f} MiB {reserved / 2**20:>12,.2f} MiB  {test}"
            if len(peaks) > NUM_PEAKS and not all_peaks:
                yield f"... and {len(peaks) - NUM_PEAKS} more (-v shows all)"
        for folder, number in sorted(Counter(self._recorded.values()).items()):
            yield f"recorded {number} in {folder}"
        for test, reason in sorted(self._not_recorded.items()):
            yield f"not recorded: {test}: {reason}"
        if self._digests:
            lines = "".join(f"{test} {digest}\n" for test, digest in sorted(self._digests.items()))
            digest = hashlib.sha256(lines.encode()).hexdigest()[:DIGEST_LENGTH]
            yield f"event logs: {len(self._digests)}, together {digest}"
