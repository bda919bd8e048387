"""npusim's double of ``xlite._C`` over the driver that torch_npu runs on, so that both share one device's memory."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping

import torch
import torch_npu  # noqa: F401  # loads libascendcl.so, and a current device

from npusim.device.hbm import OutOfHbmError
from npusim.device.profile import load_profile
from npusim.vendor.xlite._C import *  # noqa: F403
from npusim.vendor.xlite._C import Runtime, __getattr__  # noqa: F401
from npusim.xlite import DeviceFacts, OutsideAllocation
from npusim.xlite.versions import DEFAULT_VERSION

HUGE_PAGES_FIRST = 0


class IdleCommunicator:
    """HCCL of the stub takes no memory."""

    def operate(self) -> None:
        """Nothing happens."""


class CannDriver:
    """Devices by libascendcl's own calls. Memory goes back when its owner dies."""

    version = DEFAULT_VERSION

    def __init__(self) -> None:
        self._acl = ctypes.CDLL("libascendcl.so")
        self._acl.aclrtFree.argtypes = [ctypes.c_void_p]

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ

    def current_device(self) -> int:
        return torch.npu.current_device()

    def facts(self, device: int) -> DeviceFacts:
        profile = load_profile("a2-64g")  # the stub's default chip
        return DeviceFacts(num_ai_cores=profile.num_aicore.value, devices_per_node=profile.devices_per_node.value)

    def take_pool(self, owner: object, device: int, num_bytes: int) -> None:
        address = ctypes.c_void_p()
        with torch.npu.device(device):
            if self._acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(num_bytes), HUGE_PAGES_FIRST):
                raise OutOfHbmError(num_bytes, torch.npu.mem_get_info()[0], "the driver refused it")
        weakref.finalize(owner, self._acl.aclrtFree, address.value)

    def take_outside(self, owner: object, device: int, allocation: OutsideAllocation) -> None:
        """One block for all: the stub would charge a whole page for each of them, which a driver does not."""
        self.take_pool(owner, device, allocation.num_bytes)

    def communicator(self, device: int, name: str, num_ranks: int) -> IdleCommunicator:
        return IdleCommunicator()

    computes_values = False

    def launch(self, device: int, model: object, lengths: object) -> None:
        pass

    def forget(self, target: torch.Tensor) -> None:
        pass


Runtime._driver = CannDriver()
