"""Ties the doubles to torch, once per process."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

ASCEND_EXTENSION = "vllm_ascend.vllm_ascend_C"
"""vllm-ascend's compiled extension, which lies inside an installed package and needs the real torch_npu."""


class _AscendExtensionFinder(MetaPathFinder):
    """Finds the double of the extension before the installed package's own file."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        del path, target
        if fullname != ASCEND_EXTENSION:
            return None
        return spec_from_file_location(fullname, Path(__file__).with_name("vllm_ascend_C.py"))


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
    sys.meta_path.insert(0, _AscendExtensionFinder())
