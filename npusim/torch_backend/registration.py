"""Torch's once-per-process registration of device ``npu``: the project's only process-wide state.

What is registered asks for the active world at each call, so that worlds follow each other in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils import backend_registration

from npusim.errors import WorldError
from npusim.torch_backend.shells import Shells

if TYPE_CHECKING:
    from npusim.torch_backend.runtime import Platform

F = TypeVar("F", bound=Callable[..., Any])


class _Process:
    """This process' registration and active world."""

    platform: Platform | None = None
    libraries: dict[str, torch.library.Library] = {}  # noqa: RUF012
    kernels: list[tuple[str, str, Callable[..., Any], str | None, str]] = []  # noqa: RUF012
    shells = Shells()
    registered = False


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, dev_id: int) -> bool:
        return _Process.platform is not None and dev_id < len(_Process.platform.runtimes)


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def platform() -> Platform:
    """The active world.

    Raises:
        WorldError: There is none.
    """
    if _Process.platform is None:
        raise WorldError("no world is active: call npusim.install(SimWorld(...)) first, or use the world as a context")
    return _Process.platform


def has_platform() -> bool:
    """Whether a world is active."""
    return _Process.platform is not None


def shells() -> Shells:
    """What makes tensors, in all worlds."""
    return _Process.shells


def activate(world: Platform) -> None:
    """Make ``world`` the one that device ``npu`` means.

    Raises:
        WorldError: Another world is active.
    """
    if _Process.platform is not None and _Process.platform is not world:
        raise WorldError("another world is active; deactivate it first (two worlds never share a process at one time)")
    _Process.platform = world


def deactivate(world: Platform) -> None:
    """Undo :func:`activate`; nothing happens if ``world`` is not the active one."""
    if _Process.platform is world:
        _Process.platform = None


def kernel(
    namespace: str, name: str, schema: str | None = None, *, dispatch_key: str = "PrivateUse1"
) -> Callable[[F], F]:
    """Declare the function as the kernel of operator ``namespace::name`` on device ``npu``.

    With ``schema`` the operator itself is defined, too. Kernels are handed to torch by :func:`register`. Another
    ``dispatch_key`` of torch is for what concerns host tensors, e.g. pinned ones.
    """

    def declare(function: F) -> F:
        _Process.kernels.append((namespace, name, function, schema, dispatch_key))
        if _Process.registered:
            _hand_over()
        return function

    return declare


def has_kernel(namespace: str, name: str) -> bool:
    """Whether a kernel was declared for an operator."""
    return any((namespace, name) == known[:2] for known in _Process.kernels)


def define(namespace: str, schema: str) -> None:
    """Define an operator without a kernel, so that on device ``npu`` the fallback gets it."""
    _library(namespace).define(schema)


def _library(namespace: str) -> torch.library.Library:
    library = _Process.libraries.get(namespace)
    if library is None:
        library = torch.library.Library(namespace, "IMPL" if namespace == "aten" else "FRAGMENT")
        _Process.libraries[namespace] = library
    return library


def _hand_over() -> None:
    for namespace, name, function, schema, dispatch_key in _Process.kernels:
        library = _library(namespace)
        if schema is not None:
            library.define(schema)
        library.impl(name, function, dispatch_key)
    _Process.kernels.clear()


def register(npu_module: ModuleType, fallback: Callable[..., Any]) -> None:
    """Register device ``npu`` with torch, once per process: ``torch.npu``, all declared kernels and the fallback.

    Args:
        npu_module: Becomes ``torch.npu``.
        fallback: Called as ``fallback(op, *args, **kwargs)`` for an operator that no kernel was declared for.

    Raises:
        WorldError: Another backend holds torch's PrivateUse1 slot in this process, e.g. the real torch_npu.
    """
    if _Process.registered:
        return
    if torch._C._get_privateuse1_backend_name() != "privateuseone":
        raise WorldError(
            f"torch device {torch._C._get_privateuse1_backend_name()!r} is already registered in this process; the "
            "simulated and the real torch_npu never share one"
        )
    backend_registration._setup_privateuseone_for_python_backend("npu", npu_module, _Hooks(), _Guard())
    wildcard = torch.library.Library("_", "IMPL")
    wildcard.fallback(fallback, "PrivateUse1")
    _Process.libraries["_"] = wildcard
    from npusim.torch_backend.torch_patches import patch  # which asks for the active world

    _hand_over()
    patch(npu_module)
    _Process.registered = True
