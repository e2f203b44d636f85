"""Words about the values of a configuration: what a key takes, and which one was meant."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
EXAMPLES = {int: "64", float: "0.1", bool: "true", str: "name"}


def nearest(key: str, known: Iterable[str]) -> str:
    """``"; did you mean NAME?"`` for the known name closest to ``key``, or what there is."""
    names = sorted(known)
    tails = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
    tops = [name for name in names if "." not in name]
    close = difflib.get_close_matches(key, names if "." in key else tops, n=1, cutoff=0.6)
    if not close:
        # A bare name given for a dotted one: seq_len for data.seq_len.
        last = difflib.get_close_matches(key.rsplit(".", 1)[-1], tails, n=1, cutoff=0.6)
        close = [tails[name] for name in last]
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(names)}" if 0 < len(names) <= 12 else ""


def keys_of(cls: Any, prefix: str = "") -> list[str]:
    """The dotted names of every value that dataclass ``cls`` takes."""
    names: list[str] = []
    for name, kind in get_type_hints(cls).items():
        nested = next((k for k in options(kind) if dataclasses.is_dataclass(k)), None)
        names += keys_of(nested, f"{prefix}{name}.") if nested else [prefix + name]
    return names


def show(value: Any) -> str:
    """``value`` as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(show, value)) + "]"
    # Quotes tell the text "[64,64]" from the list.
    return f'"{value}"' if isinstance(value, str) and "[" in value else str(value)


def options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def form(kind: Any, key: str, field: Any) -> str:
    """What ``key`` takes and an example to copy."""
    words = [_describe(option) for option in options(kind) if option is not types.NoneType]
    null = " or null" if types.NoneType in options(kind) else ""
    low, high = field.metadata.get("low"), field.metadata.get("high")
    bounds = [f"{sign} {b:g}" for sign, b in ((">=", low), ("<=", high)) if b is not None]
    limits = f" {' and '.join(bounds)}" if bounds else ""
    default = None if field.default is dataclasses.MISSING else field.default
    example = show(default) if default is not None else _example(options(kind)[0])
    quoted = f"'{key}={example}'" if "[" in example else f"{key}={example}"
    return f"{' or '.join(words)}{limits}{null} is needed, e.g. {quoted}"


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(show, get_args(kind)))
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        count = "" if parts[-1] is Ellipsis else f"{len(parts)} "
        inner = " or ".join(
            _describe(k).removeprefix("a ") + "s" * (k in (int, float)) for k in options(parts[0])
        )
        return f"a list of {count}{inner}"
    return NOUNS.get(kind, getattr(kind, "__name__", str(kind)))


def _example(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return show(get_args(kind)[0])
    if get_origin(kind) is tuple:
        parts = [k for k in get_args(kind) if k is not Ellipsis]
        return "[" + ",".join(_example(options(k)[0]) for k in parts) + "]"
    return EXAMPLES.get(kind, "...")


def form_of(cls: type, key: str, prefix: str = "") -> str | None:
    """:func:`form` of the dotted ``key`` of dataclass ``cls``; None when there is no such key."""
    head, _, rest = key.partition(".")
    field = next((f for f in dataclasses.fields(cls) if f.name == head), None)
    if field is None:
        return None
    kind = get_type_hints(cls)[head]
    nested = next((k for k in options(kind) if dataclasses.is_dataclass(k)), None)
    if nested is not None and isinstance(nested, type):
        return form_of(nested, rest, f"{prefix}{head}.") if rest else None
    return None if rest else form(kind, prefix + key, field)
