"""Empty tensors on a given device, to be pointed at storages.

torch's Python interface for backends makes them on device 0 only, and a tensor's device can never change. A DLPack capsule
can name any index, so the first shell of each device comes from one.
"""

from __future__ import annotations

import ctypes

import torch

_EXTENSION_DEVICE = 12  # kDLExtDev, which torch reads as PrivateUse1
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""The CPU kernels of pure metadata operators work on any storage, since they never touch its bytes."""
_alias = torch.ops.aten.alias.default
_view_dtype = torch.ops.aten.view.dtype


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Shells:
    """Makes empty tensors on simulated devices, of any dtype."""

    def __init__(self) -> None:
        self._kept: list[object] = []  # what DLPack capsules point at lives as long as their tensors
        self._templates: dict[tuple[int, torch.dtype, bool], torch.Tensor] = {}

    def shell(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of no elements on device ``index``, free to be given another storage.

        Inside ``torch.inference_mode`` it is an inference tensor, as any new tensor there is.
        """
        key = index, dtype, torch.is_inference_mode_enabled()
        template = self._templates.get(key)
        if template is None:
            template = _view_dtype.redispatch(CPU_KEYS, self._from_capsule(index), dtype)
            self._templates[key] = template
        result: torch.Tensor = _alias.redispatch(CPU_KEYS, template)
        return result

    def _from_capsule(self, index: int) -> torch.Tensor:
        shape = (ctypes.c_int64 * 1)(0)
        managed = _ManagedTensor(
            _Tensor(None, _Device(_EXTENSION_DEVICE, index), 1, _DataType(1, 8, 1), shape, None, 0), None, None
        )
        self._kept.append((managed, shape))
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        capsule = new_capsule(ctypes.addressof(managed), b"dltensor", None)
        result: torch.Tensor = torch._C._from_dlpack(capsule)
        return result
