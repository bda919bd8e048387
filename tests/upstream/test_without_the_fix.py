"""One line of the fix taken out of a copy of upstream: the published figures after the fix do not come out any more."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.upstream.cases import SEED
from tests.upstream.conftest import run_upstream

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]

THE_LINE = 'if getattr(forward_context, "in_profile_run", False):'


@pytest.fixture
def release_without_the_fix(upstream_environment: Path, tmp_path: Path) -> Path:
    """The later release, of which one line differs; all other files are links."""
    release = upstream_environment / "0.23.0"
    for entry in release.iterdir():
        if entry.name != "vllm_ascend":
            (tmp_path / entry.name).symlink_to(entry.resolve())
    shutil.copytree(release / "vllm_ascend", tmp_path / "vllm_ascend", copy_function=os.symlink, symlinks=True)
    source = tmp_path / "vllm_ascend" / "xlite" / "xlite.py"
    text = source.read_text(encoding="utf-8")
    assert text.count(THE_LINE) == 1
    source.unlink()
    source.write_text(text.replace(THE_LINE, "if False:"), encoding="utf-8")
    return tmp_path


def test_profile_run_of_the_model_comes_back(upstream_environment, release_without_the_fix):
    """The peak is that of the model again, and the KV cache is as small as before the fix."""
    run = run_upstream(upstream_environment, release_without_the_fix, "tests.upstream.engine", SEED)
    result = json.loads(run.stdout)
    assert not any("GPU KV cache size: 626,176 tokens" in line for line in result["log_lines"])
    assert result["peak_activation"] > 600 << 20
