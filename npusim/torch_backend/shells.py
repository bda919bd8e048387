"""Tensors over device memory; torch's interface for backends in Python makes them on device 0 only.

A DLPack capsule can name any device, address, type and geometry, so tensors come from capsules. One capsule per device
and type is filled in anew for each tensor.
"""

from __future__ import annotations

import ctypes

import torch

_EXTENSION_DEVICE = 12  # kDLExtDev, which torch reads as PrivateUse1
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""The CPU kernels of pure metadata operators work on any storage, since they never touch its bytes."""
_alias = torch.ops.aten.alias.default
_set = torch.ops.aten.set_.source_Storage_storage_offset
_view_dtype = torch.ops.aten.view.dtype
_from_capsule = torch._C._from_dlpack
_MAX_DIMS = 64

_TYPE_CODES = {
    torch.int8: 0,
    torch.int16: 0,
    torch.int32: 0,
    torch.int64: 0,
    torch.uint8: 1,
    torch.uint16: 1,
    torch.uint32: 1,
    torch.uint64: 1,
    torch.float16: 2,
    torch.float32: 2,
    torch.float64: 2,
    torch.bfloat16: 4,
    torch.complex64: 5,
    torch.complex128: 5,
    torch.bool: 6,
}
"""DLPack's codes of the types that it has in every version."""


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


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_rename_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)

_increment_references = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class _Mould:
    """The capsule of one device and type."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        self._size = (ctypes.c_int64 * _MAX_DIMS)()
        self._stride = (ctypes.c_int64 * _MAX_DIMS)()
        self._managed = _ManagedTensor(
            _Tensor(
                None,
                _Device(_EXTENSION_DEVICE, index),
                0,
                _DataType(_TYPE_CODES[dtype], 8 * dtype.itemsize, 1),
                self._size,
                self._stride,
                0,
            ),
            None,
            None,
        )
        # torch looks at it again when a storage made from it dies, and tensors may outlive their world: never freed.
        _increment_references(self._managed)
        self._tensor = self._managed.dl_tensor
        self._capsule = _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)

    def cast(self, address: int, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        num_dims = len(size)
        tensor = self._tensor
        tensor.data = address
        tensor.ndim = num_dims
        self._size[:num_dims] = size  # type: ignore[call-overload]  # takes any sequence
        self._stride[:num_dims] = stride  # type: ignore[call-overload]
        _rename_capsule(self._capsule, b"dltensor")  # torch renames a capsule that it has read
        result: torch.Tensor = _from_capsule(self._capsule)
        return result


class Shells:
    """Makes tensors on simulated devices, of any type. It knows no world, so one serves them all."""

    def __init__(self) -> None:
        self._moulds: dict[tuple[int, torch.dtype], _Mould] = {}
        self._templates: dict[tuple[int, torch.dtype, bool], torch.Tensor] = {}

    def over_memory(
        self,
        index: int,
        address: int,
        num_bytes: int,
        dtype: torch.dtype,
        size: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        """A tensor over ``num_bytes`` bytes of device memory, which nobody frees when it dies."""
        mould = self._moulds.get((index, dtype))
        if mould is not None:
            return mould.cast(address, size, stride)
        if dtype in _TYPE_CODES:
            self._moulds[index, dtype] = _Mould(index, dtype)
            return self.over_memory(index, address, num_bytes, dtype, size, stride)
        memory = self.over_memory(index, address, num_bytes, torch.uint8, (num_bytes,), (1,))
        return self.over_storage(memory.untyped_storage(), dtype, size, stride, 0)

    def over_storage(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
    ) -> torch.Tensor:
        """A tensor over an existing storage.

        Inside ``torch.inference_mode`` it is an inference tensor, as any new tensor there is.
        """
        key = storage.device.index, dtype, torch.is_inference_mode_enabled()
        template = self._templates.get(key)
        if template is None:
            template = self.over_memory(key[0], 0, 0, torch.uint8, (0,), (1,))
            if dtype is not torch.uint8:
                template = _view_dtype.redispatch(CPU_KEYS, template, dtype)
            self._templates[key] = template
        shell = _alias.redispatch(CPU_KEYS, template)
        result: torch.Tensor = _set.redispatch(CPU_KEYS, shell, storage, offset, size, stride)
        return result
