"""Ties the doubles to torch, once per process."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

BUILT_FOR_ASCEND = {
    "vllm_ascend.vllm_ascend_C": "vllm_ascend_C.py",
    "vllm_ascend._build_info": "vllm_ascend_build_info.py",
}
"""What building vllm-ascend for a kind of device puts into its package, and the doubles' files.

The compiled extension needs the real torch_npu, and published wheels are built for one kind of device.
"""


class _BuiltForAscendFinder(MetaPathFinder):
    """Finds the doubles before what the installed package has, if it was built at all."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        del path, target
        if fullname not in BUILT_FOR_ASCEND:
            return None
        return spec_from_file_location(fullname, Path(__file__).with_name(BUILT_FOR_ASCEND[fullname]))


def bind(npu_module: ModuleType) -> None:
    """Register device ``npu``, its operators and the ``hccl`` backend with torch.

    Args:
        npu_module: Becomes ``torch.npu``.

    Raises:
        WorldError: The real torch_npu got there first.
    """
    from npusim import ops
    from npusim.ops import distributed
    from npusim.torch_backend import registration
    from npusim.torch_backend.fallback import fallback

    ops.declare_all()
    registration.register(npu_module, fallback)
    distributed.register_backend()
    sys.meta_path.insert(0, _BuiltForAscendFinder())
