"""Reading a JSON object field by field; what is wrong is refused by the field's name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from heavywater.http.errors import ApiError, invalid

_SHOWN_CHARACTERS = 60


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request's body. Raises ApiError."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {shown(value)}, want a JSON object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's")


def shown(value: object) -> str:
    """A value as an error names it, at most about 60 characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def checked_text(name: str, value: object) -> str:
    """A string that UTF-8 can hold. Raises ApiError."""
    if not isinstance(value, str):
        raise invalid(name, f"is {shown(value)}, want a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, f"is no Unicode: half a surrogate pair at character {error.start}") from None
    return value


class Fields:
    """An object's fields. null is as good as absent. done() refuses those that nobody has read."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        """As errors name it."""
        return self._prefix + field

    def take(self, field: str) -> Any:
        """The value as it came; None when absent."""
        self._read.add(field)
        return self._values.get(field)

    def text(self, field: str, default: str = "") -> str:
        value = self.take(field)
        return default if value is None else checked_text(self.name(field), value)

    def boolean(self, field: str) -> bool:
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise invalid(self.name(field), f"is {shown(value)}, want true or false")
        return bool(value)

    def integer(self, field: str, least: int, most: int) -> int | None:
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise invalid(self.name(field), f"is {shown(value)}, want a whole number from {least} to {most}")
        return value

    def number(self, field: str, least: float, most: float) -> float | None:
        value = self.take(field)
        if value is None:
            return None
        # "1e999" is infinity, and a whole number may be longer than any float.
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
        if not good or not math.isfinite(value):
            raise invalid(self.name(field), f"is {shown(value)}, want a number from {least:g} to {most:g}")
        return float(value)

    def nested(self, field: str) -> Fields:
        """The fields of an object within; of an empty one when absent."""
        value = self.take(field)
        if value is not None and not isinstance(value, dict):
            raise invalid(self.name(field), f"is {shown(value)}, want an object")
        return Fields(value or {}, f"{self.name(field)}.")

    def ignore(self, *fields: str) -> None:
        """Fields that change nothing here."""
        self._read.update(fields)

    def want(self, field: str, *served: object) -> None:
        """A field of which only some values are served, absent among them."""
        value = self.take(field)
        if value is not None and not any(value == one and type(value) is type(one) for one in served):
            # An object is shown as one; which one is wanted has to be said.
            wanted = " or ".join(json.dumps(one) if isinstance(one, dict) else shown(one) for one in served)
            wanted = wanted or "it absent"
            raise invalid(self.name(field), f"is {shown(value)}, which is not served; want {wanted}")

    def done(self) -> None:
        for field in self._values:
            if field not in self._read:
                raise invalid(self.name(field), "no such field is served")
