"""Values of a JSON object, each of its type and range, or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

from tierstore.serve.api.errors import ApiError, bad
from tierstore.units import is_unicode

_SHOWN = 40  # characters of a value in a message

#: Fields that are not offered: which values change nothing, and why others are refused.
Neutral = Mapping[str, tuple[Callable[[object], bool], str]]
NOT_OFFERED = "is not offered by this server"


def one_of(*values: object) -> Callable[[object], bool]:
    """Accepts these values; without any, none. A boolean is no number."""
    return lambda value: any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in values
    )


def any_of(kind: type) -> Callable[[object], bool]:
    """Accepts every value of ``kind``."""
    return lambda value: isinstance(value, kind)


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object of a request. Raises ApiError for anything else."""
    try:
        value = json.loads(body, parse_constant=_not_json)
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {shown(str(error), most=120)}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {kind(value)}")
    return value


def _not_json(text: str) -> object:
    raise ValueError(f"{text} is no JSON number")


def kind(value: object) -> str:
    """What JSON calls its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def shown(value: object, *, most: int = _SHOWN) -> str:
    """A value in a message: short, printable, on one line."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= most else f"{text[:most]}..."


class Fields:
    """The fields of an object: each is taken once, and ``done`` refuses what nobody took. Null is as if left out."""

    def __init__(self, values: dict[str, object], *, path: str = "") -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def name(self, field: str) -> str:
        """Where a field is: ``messages[0].role``."""
        return f"{self._path}{field}"

    def take(self, field: str) -> object:
        """A value of any type; None where there is none."""
        return self._left.pop(field, None)

    def text(self, field: str) -> str | None:
        """A string."""
        value = self.take(field)
        return None if value is None else as_text(value, self.name(field))

    def flag(self, field: str) -> bool:
        """A boolean; False where there is none."""
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise bad(self.name(field), f"expected a boolean, got {kind(value)}")
        return bool(value)

    def whole(self, field: str, low: int, high: int) -> int | None:
        """A whole number from ``low`` to ``high``."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad(self.name(field), f"expected a whole number, got {_numeric(value)}")
        if not low <= value <= high:
            raise bad(self.name(field), f"expected {low} to {high}, got {shown(value)}")
        return value

    def number(self, field: str, low: float, high: float) -> float | None:
        """A number from ``low`` to ``high``."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad(self.name(field), f"expected a number, got {kind(value)}")
        if not low <= value <= high or not math.isfinite(value):
            raise bad(self.name(field), f"expected {low:g} to {high:g}, got {shown(value)}")
        return float(value)

    def inner(self, field: str) -> Fields | None:
        """An object."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise bad(self.name(field), f"expected an object, got {kind(value)}")
        return Fields(value, path=f"{self.name(field)}.")

    def neutral(self, table: Neutral) -> None:
        """Fields that are not offered: each is accepted where it changes nothing, and refused by its reason elsewhere."""
        for field, (accepted, reason) in table.items():
            value = self.take(field)
            if value is not None and not accepted(value):
                raise bad(self.name(field), reason)

    def done(self) -> None:
        """Refuses what is left."""
        for field in self._left:
            raise bad(shown(self.name(field)), "is no field of this request")


def _numeric(value: object) -> str:
    return shown(value) if isinstance(value, float) else kind(value)


def as_text(value: object, name: str) -> str:
    """A string that is text: lone surrogates, which JSON can write, are not."""
    if not isinstance(value, str):
        raise bad(name, f"expected a string, got {kind(value)}")
    if not is_unicode(value):
        raise bad(name, "holds half of a surrogate pair, which is no character")
    return value
