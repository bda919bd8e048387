"""Attributes of xlite's native classes: typed, with defaults, and copied in and out, as pybind11 does it.

Grade: exact for 0.1.0rc11 and 0.1.0rc11.dev210, tried on the published wheels: names, defaults, values taken, errors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from npusim.torch_backend.registration import has_platform, platform
from npusim.xlite.versions import DEFAULT_VERSION

MAX_UNSIGNED = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of the native side.

    Attributes:
        text: Its name in error messages.
        convert: Makes a value of it, or raises TypeError.
    """

    text: str
    convert: Callable[[Any], Any]


def _to_unsigned(value: Any) -> int:
    number = operator.index(value)
    if not 0 <= number <= MAX_UNSIGNED:
        raise TypeError("out of range")
    return number


def _to_float(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError("a text")
    return float(value)


def _to_bool(value: Any) -> bool:
    if value is not None and not hasattr(type(value), "__bool__"):
        raise TypeError("has no truth value")
    return bool(value)


def _to_tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError("no tensor")
    return value


UNSIGNED = Kind("typing.SupportsInt", _to_unsigned)
FLOAT = Kind("typing.SupportsFloat", _to_float)
BOOL = Kind("bool", _to_bool)
TENSOR = Kind("torch.Tensor", _to_tensor)


def enum_of(enum: type[IntEnum], text: str) -> Kind:
    """Members of an enumeration; plain numbers are refused."""

    def convert(value: Any) -> IntEnum:
        if not isinstance(value, enum):
            raise TypeError("no member")
        return value

    return Kind(text, convert)


def list_of(item: Kind) -> Kind:
    """A sequence, set or generator of items, kept as a list; texts, mappings and tensors are refused."""

    def convert(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(
            value, (Sequence, AbstractSet, Generator, np.ndarray)
        ):
            raise TypeError("no sequence")
        if item is UNSIGNED and _are_unsigned(value):
            return list(value)
        return [item.convert(each) for each in value]

    return Kind(f"collections.abc.Sequence[{item.text}]", convert)


def _are_unsigned(values: Any) -> bool:
    """Whether all of a list are plain numbers that need no conversion; block tables have many."""
    return type(values) is list and set(map(type, values)) == {int} and 0 <= min(values) <= max(values) <= MAX_UNSIGNED


def imitated_version() -> str:
    """The release of xlite that the active world imitates; without a world the default one."""
    return platform().xlite_version if has_platform() else DEFAULT_VERSION


class Field:
    """One attribute.

    Args:
        kind: Its type.
        default: Its value until it is set.
        generations: Releases that have it, by the start of their version.
        storage: Name under which it is kept, if it is another name of an attribute.
    """

    def __init__(
        self, kind: Kind, default: Any, *, generations: tuple[str, ...] = ("0.1", "0.2"), storage: str | None = None
    ) -> None:
        self._kind = kind
        self._default = default
        self._generations = generations
        self._storage = storage

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._owner = owner.__name__
        self._storage = self._storage or name

    def __get__(self, instance: Any, owner: type) -> Any:
        self._check_exists()
        if instance is None:
            return self
        value = instance.__dict__.get(self._storage, self._default)
        return _copied(value)

    def __set__(self, instance: Any, value: Any) -> None:
        self._check_exists()
        try:
            instance.__dict__[self._storage] = self._kind.convert(value)
        except (TypeError, ValueError):
            signature = f"(self: xlite._C.{self._owner}, arg0: {self._kind.text}) -> None"
            raise incompatible("", signature, f"<xlite._C.{self._owner} object>, {value!r}") from None

    def _check_exists(self) -> None:
        version = imitated_version()
        if not version.startswith(self._generations):
            raise AttributeError(f"'xlite._C.{self._owner}' object of xlite {version} has no attribute {self._name!r}")


def _copied(value: Any) -> Any:
    """Lists are of one type of item throughout."""
    if not isinstance(value, list):
        return value
    return [_copied(item) for item in value] if value and isinstance(value[0], list) else value.copy()


def incompatible(name: str, signature: str, arguments: str) -> TypeError:
    """The error of pybind11 for arguments that fit no overload."""
    kind = "constructor" if name == "__init__" else "function"
    supported = f"The following argument types are supported:\n    1. {signature}"
    return TypeError(f"{name}(): incompatible {kind} arguments. {supported}\n\nInvoked with: {arguments}")


class Closed:
    """Refuses unknown attributes, as a native class does; a Python subclass accepts them."""

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)
        if Closed in kind.__bases__ and not hasattr(kind, name):
            raise AttributeError(f"'xlite._C.{kind.__name__}' object has no attribute {name!r}")
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Names that the imitated release has; vllm-ascend's representation of a configuration reads them all."""
        return [name for name in super().__dir__() if name in self.__dict__ or hasattr(type(self), name)]
