"""Puts a world behind device ``npu`` in a process that knows nothing of npusim: at its first ``import torch``.

torch imports every backend whose distribution names it as such; the double of torch_npu, found on ``PYTHONPATH``, does
as the real one does. ``python -m npusim run`` sets the two environment variables, and child processes inherit them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORLD = "NPUSIM_WORLD"
"""Environment variable with the arguments of :class:`npusim.SimWorld` as JSON."""


def environment_of_children(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """An environment whose processes find a world of their own behind device ``npu``.

    Args:
        settings: Arguments of :class:`npusim.SimWorld`; anything that JSON can hold.
        environment: What they get besides.
    """
    from npusim.installation import VENDOR_PATH

    paths = [VENDOR_PATH, str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path), WORLD: json.dumps(settings)}


def autoload() -> None:
    """Install a world as the environment describes it, if it does and none is active.

    Raises:
        TypeError: The description names settings that :class:`npusim.SimWorld` does not have.
    """
    settings = os.environ.get(WORLD)
    if settings is None:
        return
    from npusim.torch_backend.registration import has_platform

    if not has_platform():
        from npusim import SimWorld, install

        install(SimWorld(**json.loads(settings)))
