"""Turn a plain mapping into a dataclass, and say in one line per mistake what is wrong with it.

The dataclass is the schema: its annotations give the types, ``field(metadata=...)`` the limits.
Supported annotations: int, float, bool, str, ``X | None``, ``Literal``, ``tuple[...]``, other
dataclasses, ``dict[str, Any]`` (taken as it is) and ``Any``.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from flashmod.training.forms import form, nearest, options, show

T = TypeVar("T")
MISSING = "???"  # what OmegaConf writes for a value that must be given


class ConfigError(ValueError):
    """A configuration that cannot run; ``problems`` holds one line for each mistake."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def number(default: Any, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field for a number in ``[low, high]``."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """An instance of dataclass ``cls`` from ``values``.

    Raises:
        ConfigError: every unknown key, wrong type and value out of range, by its full dotted name.
    """
    problems: list[str] = []
    instance = _build(cls, values, prefix, problems)
    if problems:
        raise ConfigError(problems)
    return instance


def _build(cls: Any, values: Any, prefix: str, problems: list[str]) -> Any:
    if not isinstance(values, Mapping):
        problems.append(f"{prefix[:-1]}={show(values)}: a group of values is needed, not one value")
        return None
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for name in values.keys() - fields.keys():
        known = [prefix + name for name in fields]
        problems.append(
            f"{prefix}{name}={show(values[name])}: unknown key" + nearest(prefix + name, known)
        )
    before, made = len(problems), {}
    for name, field in fields.items():
        if name in values and values[name] != MISSING:
            made[name] = _value(hints[name], values[name], prefix + name, field, problems)
        elif name in values or _required(field):
            problems.append(f"{prefix}{name}: missing; {form(hints[name], prefix + name, field)}")
    if len(problems) > before or values.keys() - fields.keys():
        return None
    try:
        return cls(**made)
    except ConfigError as error:
        problems += error.problems
    except (ValueError, TypeError) as error:
        named = str(error).startswith(prefix)
        problems.append(str(error) if named else f"{prefix[:-1]}: {error}")
    return None


def _value(kind: Any, value: Any, key: str, field: Any, problems: list[str]) -> Any:
    for option in options(kind):
        if dataclasses.is_dataclass(option) and value is not None:
            return _build(option, value, key + ".", problems)
        fits, made = _fit(option, value)
        if fits and _in_range(made, field):
            return made
    problems.append(f"{key}={show(value)}: {form(kind, key, field)}")
    return None


def _fit(kind: Any, value: Any) -> tuple[bool, Any]:
    """Whether ``value`` is of ``kind``, and the value as that kind."""
    if kind is Any or (kind is types.NoneType and value is None):
        return True, value
    if get_origin(kind) is Literal:
        return value in get_args(kind), value
    if get_origin(kind) is tuple:
        return _fit_tuple(get_args(kind), value)
    if get_origin(kind) is dict or kind is dict:
        return isinstance(value, Mapping), value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return True, float(value)
    right = isinstance(kind, type) and isinstance(value, kind)
    return right and isinstance(value, bool) == (kind is bool), value


def _fit_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, None
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        return False, None
    made = []
    for kind, item in zip(kinds, value, strict=True):
        hits = [m for fits, m in (_fit(k, item) for k in options(kind)) if fits]
        if not hits:
            return False, None
        made.append(hits[0])
    return True, tuple(made)


def _in_range(value: Any, field: Any) -> bool:
    low, high = field.metadata.get("low"), field.metadata.get("high")
    numbers = [v for v in (value if isinstance(value, tuple) else (value,)) if v is not None]
    numbers = [v for v in numbers if isinstance(v, (int, float))]
    return all((low is None or v >= low) and (high is None or v <= high) for v in numbers)


def _required(field: Any) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING
