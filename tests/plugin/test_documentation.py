"""docs/testing.md and examples/ci name what there is, all of it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npusim import pytest_plugin
from npusim.testing.capabilities import own_capabilities
from npusim.testing.marks import MARKERS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "testing.md"
OPTION = re.compile(r"(--npusim-[a-z]+)(?:[ =](sim|npu)\b)?")


def test_tables():
    rows = re.findall(r"^\| `([\w-]+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    markers = {re.split(r"[(:]", line)[0] for line in MARKERS}
    fixtures = {name for name, value in vars(pytest_plugin).items() if name.startswith("npu_") and callable(value)}
    options = {row for row in rows if row.startswith("--")}
    assert sorted(rows) == sorted(markers | fixtures | own_capabilities("sim").keys() | options)


@pytest.mark.parametrize("path", [PAGE, *sorted((ROOT / "examples" / "ci").glob("*.yml"))], ids=lambda path: path.name)
def test_options(path, request):
    found = OPTION.findall(path.read_text(encoding="utf-8"))
    assert found
    for option, _ in found:
        request.config.getoption(option)


@pytest.mark.parametrize(("job", "device"), [("laptop", "sim"), ("ascend", "npu")])
def test_jobs(job, device):
    text = (ROOT / "examples" / "ci" / f"{job}.yml").read_text(encoding="utf-8")
    assert OPTION.findall(text) == [("--npusim-device", device)]
