"""Errors in torch_npu's words: its text, then the line with its error code, without the time and process in it."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=Exception)


def vendor_error(kind: type[E], text: str, code: str) -> E:
    """The exception that torch_npu raises with this text and error code."""
    return kind(f"{text}\n[ERROR] {code}")
