"""What a device profile is calibrated on: the steps that take memory outside the caching allocator, one by one.

On a card that nobody else uses, in a process of its own::

    pytest --npusim-device=npu --npusim-record=recordings examples/ci/test_calibration.py
    python -m npusim calibrate recordings/*.json.gz
"""

from __future__ import annotations


def test_steps(npu_device, npu_memory):
    """Each phase is named after what has just happened for the first time."""
    import torch

    x = torch.empty(1 << 20, device=npu_device)
    npu_memory.phase("opened")

    x.zero_()
    torch.npu.synchronize()
    npu_memory.phase("first operator")

    y = torch.empty_like(x)
    npu_memory.phase("second tensor")

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch.add(x, 1, out=y)
    npu_memory.phase("graph captured")
    assert npu_memory.phases[-1].outside_bytes >= npu_memory.phases[0].outside_bytes
