"""``torch.UntypedStorage`` on device ``npu``, as far as Python code makes, resizes and measures storages itself."""

from __future__ import annotations

from typing import Any

import torch

from npusim.errors import UnmodelledCallError
from npusim.torch_backend.registration import has_platform, platform
from npusim.torch_backend.tensors import runtime_of

_Storage: Any = torch.UntypedStorage
_new = _Storage.__new__
_nbytes = _Storage.nbytes
_resize = _Storage.resize_
_write_file = _Storage._write_file
_set_from_file = _Storage._set_from_file
_str = _Storage.__str__


def patch() -> None:
    """Replace the methods whose C++ side knows only memory of torch's own devices."""
    _Storage.__new__ = new
    _Storage.nbytes = nbytes
    _Storage.__len__ = nbytes
    _Storage.resize_ = resize_
    _Storage._write_file = write_file
    _Storage._set_from_file = set_from_file
    _Storage.__str__ = _Storage.__repr__ = to_text


def new(cls: type[torch.UntypedStorage], *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """``torch.UntypedStorage(size or bytes, device=...)``."""
    if device is None or torch.device(device).type != "npu":
        return _new(cls, *args, **kwargs, **({} if device is None else {"device": device}))
    host = _new(cls, *args, **kwargs)
    runtime = runtime_of(torch.device(device))
    storage = platform().storages.allocate(runtime, host.nbytes())
    if args and not isinstance(args[0], int):
        storage.copy_(host)
    return storage


def nbytes(self: torch.UntypedStorage) -> int:
    """``UntypedStorage.nbytes``; after :func:`resize_` torch's C++ side still has the first size."""
    if self.device.type != "npu" or not has_platform():
        size: int = _nbytes(self)
        return size
    record = platform().storages.find(self)
    return _nbytes(self) if record is None else record.num_bytes


def resize_(self: torch.UntypedStorage, size: int) -> Any:
    """``UntypedStorage.resize_``: how code gives a tensor's memory back before the tensor dies, and takes it again.

    Raises:
        UnmodelledCallError: More than the storage's first size.
    """
    if self.device.type != "npu":
        return _resize(self, size)
    active = platform()
    record = active.storages.of_storage(self)
    if size > _nbytes(self):
        raise UnmodelledCallError(
            f"resize_ of an npu storage to {size} bytes is not modelled; at most its first size, {_nbytes(self)} bytes"
        )
    value = active.values.resized(record.value, record.num_bytes, size)
    record.resize(size)
    record.value = value
    return self


def write_file(self: torch.UntypedStorage, *args: Any) -> None:
    """``UntypedStorage._write_file``, by which storages are pickled."""
    _write_file(self if self.device.type != "npu" else self.cpu(), *args)


def set_from_file(self: torch.UntypedStorage, *args: Any) -> Any:
    """``UntypedStorage._set_from_file``, by which they are read back."""
    if self.device.type != "npu":
        return _set_from_file(self, *args)
    return self.copy_(_set_from_file(_Storage(self.nbytes()), *args))


def to_text(self: torch.UntypedStorage) -> str:
    """``str(storage)``, without bytes that nobody computed."""
    if self.device.type == "npu" and has_platform():
        seen = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        if not platform().values.known([seen]):
            return f"<values not computed>\n[{torch.typename(self)}(device={self.device}) of size {len(self)}]"
    text: str = _str(self)
    return text
