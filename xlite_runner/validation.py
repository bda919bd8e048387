"""Plain-text messages for values that pydantic refused: what is wrong, the value, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``'; did you mean "x"?'`` for the known name closest to ``name``, or an empty string if none is near."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f'; did you mean "{nearest[0]}"?' if nearest else ""


def explain(error: ValidationError, known_keys: Iterable[str] = ()) -> str:
    """Describe every value that pydantic refused, one line each.

    Args:
        error: What pydantic raised.
        known_keys: Where unknown keys are errors: the known ones, from which a near miss is suggested.
    """
    known = tuple(known_keys)
    details = error.errors(include_url=False, include_context=False)
    return "\n".join(
        _explain_one(detail["type"], detail["loc"], detail["msg"], detail["input"], known) for detail in details
    )


def _explain_one(
    kind: str, location: tuple[int | str, ...], message: str, value: object, known_keys: tuple[str, ...]
) -> str:
    key = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        return f'unknown key "{key}"{did_you_mean(str(location[-1]), known_keys)}'
    if kind == "missing":
        return f'missing key "{key}"'
    if kind == "value_error":  # our own validators name key and value themselves
        return message.removeprefix("Value error, ")
    return f"{key} = {value!r}: {message}"
