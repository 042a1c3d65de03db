"""One option of the configuration: its metadata, how a raw value is read, which rule it obeys.

The annotation of a dataclass field picks the reader; the metadata holds help, unit and bounds.
Everything else that talks about options (click, `--help`, TOML) is derived from these two.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from dflash.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Option:
    """What a field's metadata says about it; a bound that is None is not checked."""

    help: str
    unit: str | None = None  # shown upper-case as the value's placeholder in `--help`
    choices: tuple[str, ...] | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def broken_rule(self, value: Any) -> str | None:
        """The rule that `value` breaks, in words, or None."""
        if self.choices and value not in self.choices:
            return "must be one of " + ", ".join(self.choices)
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most:g}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}"
        return None


def option(default: Any = dataclasses.MISSING, **about: Any) -> Any:
    """A dataclass field that is an option; without a default the option is required."""
    return dataclasses.field(default=default, metadata={"option": Option(**about)})


def flag_of(field_name: str) -> str:
    """`block_size` -> `--block-size`."""
    return "--" + key_of(field_name)


def key_of(field_name: str) -> str:
    """`block_size` -> `block-size`, the key in a configuration file."""
    return field_name.replace("_", "-")


class Section:
    """Base of the section dataclasses: reads and checks every field once, at construction."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = _checked(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)  # the documented way in a frozen dataclass


def _checked(field: dataclasses.Field[Any], raw: object) -> object:
    """The value of `field` read from `raw`; raises ConfigError naming the option and its rule."""
    about: Option = field.metadata["option"]
    if raw is None and field.default is None:
        return None
    try:
        value = READERS[field.type](raw)
    except _UnreadableError as unreadable:
        raise _config_error(field, str(unreadable), raw) from None
    if rule := about.broken_rule(value):
        raise _config_error(field, rule, raw)
    return value


def _config_error(field: dataclasses.Field[Any], rule: str, raw: object) -> ConfigError:
    if field.default in (dataclasses.MISSING, None) or isinstance(field.default, bool):
        return ConfigError(flag_of(field.name), rule, raw)
    default = as_text(field.default)
    return ConfigError(
        flag_of(field.name),
        rule,
        raw,
        remedy=f"Type for example {flag_of(field.name)} {default} (the default).",
    )


def as_text(value: object) -> str:
    """`value` as one would type it on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


class _UnreadableError(ValueError):
    """A raw value that is not of the option's type; the message is the rule."""


def _read_int(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise _UnreadableError("must be a whole number")
    return raw


def _read_float(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw):
        raise _UnreadableError("must be a finite number")
    return float(raw)


def _read_bool(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise _UnreadableError("must be true or false")
    return raw


def _read_text(raw: object) -> str:
    if not isinstance(raw, str) or not raw:
        raise _UnreadableError("must be a non-empty text")
    return raw


def _read_increasing(raw: object) -> tuple[int, ...]:
    """`1,9,17` or `[1, 9, 17]`: strictly increasing, as the drafter reads captured layers."""
    parts = _parts(raw)
    if not parts or not all(part.isdecimal() for part in parts):
        raise _UnreadableError("must be numbers from 0 on, separated by commas")
    numbers = tuple(map(int, parts))
    if list(numbers) != sorted(set(numbers)):
        raise _UnreadableError("must be in increasing order, each once")
    return numbers


def _read_devices(raw: object) -> tuple[str, ...]:
    """`0,1`, `cuda:1` or `cpu,cpu`; a device may be named several times, once per thread."""
    parts = _parts(raw)
    if not parts or not all(re.fullmatch(r"cpu|(cuda:)?[0-9]+", part) for part in parts):
        raise _UnreadableError("must be GPU numbers, cuda:N or cpu, separated by commas")
    return tuple(f"cuda:{int(part)}" if part.isdecimal() else part for part in parts)


def _parts(raw: object) -> list[str]:
    items = raw.split(",") if isinstance(raw, str) else raw
    return [str(item).strip() for item in items] if isinstance(items, list | tuple) else []


READERS: dict[Any, Callable[[object], Any]] = {
    int: _read_int,
    int | None: _read_int,
    float: _read_float,
    float | None: _read_float,
    bool: _read_bool,
    str: _read_text,
    str | None: _read_text,
    tuple[int, ...] | None: _read_increasing,
    tuple[str, ...]: _read_devices,
}
