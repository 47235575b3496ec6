"""Errors of the user's making, and the ranges that configured numbers must lie in.

Ranges stand beside the fields of the dataclasses that declare them; nothing here needs Hydra.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

AUTO = "auto"
MISSING: Any = "???"
"""The default of a field that has to be given, as omegaconf writes it."""


class InputError(ValueError):
    """What the user gave is at fault, and the message says all that is needed to mend it."""


class ConfigError(InputError):
    """A configured value is out of range; the message names the key, the value and the range."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, each end included unless open, and some words."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    words: tuple[str, ...] = ()

    def __contains__(self, value: Any) -> bool:
        if value in self.words:
            return True
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isinf(value):
            return False
        above = self.low < value if self.low_open else self.low <= value
        return above and (value < self.high if self.high_open else value <= self.high)

    def __str__(self) -> str:
        text = f"a number {'>' if self.low_open else '>='} {self.low:g}"
        if not math.isinf(self.high):
            text += f" and {'<' if self.high_open else '<='} {self.high:g}"
        return "".join([text, *(f" or {word!r}" for word in self.words)])


def ranged(range_: Range, default: Any = MISSING) -> Any:
    """A dataclass field whose value, unless it is None, must lie in `range_`."""
    return field(default=default, metadata={"range": range_})


POSITIVE = Range(0, low_open=True)
COUNT = Range(1)
EFFICIENCY = Range(0, 1, low_open=True)


def check_ranges(config: Any) -> None:
    """Check every declared range. Raises ConfigError."""
    for key, value, range_ in _ranged_values("", config):
        for item in value if isinstance(value, list) else [value]:
            if item not in range_:
                raise ConfigError(f"{key}={item!r}: expected {range_}")


def _ranged_values(prefix: str, node: Any) -> Iterator[tuple[str, Any, Range]]:
    """Every set field under `node` that declares a range: its dotted key, value and range."""
    for spec in fields(node):
        value = getattr(node, spec.name)
        if is_dataclass(value):
            yield from _ranged_values(f"{prefix}{spec.name}.", value)
        elif "range" in spec.metadata and value is not None:
            yield f"{prefix}{spec.name}", value, spec.metadata["range"]
