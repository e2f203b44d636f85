"""Find the attention that Python source calls, without importing it."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

from torch import nn

from ..patches import TORCH_SDPA
from . import doors
from .names import Names

__all__ = ["Finding", "doors_for", "scan_source"]
_SDPA = "torch.nn.functional.scaled_dot_product_attention"


class Finding(NamedTuple):
    """One place where attention is built or called.

    Attributes:
        line: from 1.
        call: as the source writes it, such as ``F.scaled_dot_product_attention``.
        door: how it comes to flashmod.
        traps: what to look out for, whole sentences.
    """

    line: int
    call: str
    door: str
    traps: tuple[str, ...] = ()


def scan_source(text: str, known: Mapping[str, str] | None = None) -> list[Finding]:
    """Name each construction or call of attention, in the order of the lines.

    Found are torch's modules, functions and FlexAttention, flash-attn's functions, and
    ``attn_implementation`` of Hugging Face, under whatever name the file imports them.

    Args:
        text: Python source.
        known: dotted paths of names that ``text`` uses but does not import.

    Raises:
        SyntaxError: it is not Python.
    """
    tree = ast.parse(text)
    names = Names(tree, known)
    pairs = list(_module_calls(tree, names))
    found = {*_calls(tree, names, {built for built, _ in pairs}), *_asks_for_weights(pairs)}
    return sorted(found.union(_subclasses(tree, names)))


def _calls(tree: ast.Module, names: Names, seen: set[ast.Call]) -> Iterator[Finding]:
    """Calls of attention; ``seen`` are constructions of modules whose own calls are in sight."""
    called: set[ast.expr] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        wrapped = names.wraps(node)
        function = node.args[0] if wrapped and node.args else node.func
        called.add(function)
        path = names.resolve(function)
        door = doors.find(path)
        if door is not None and (door.builds or not wrapped):
            traps = door.traps(node) + _bound_early(function, path, names)
            if path.endswith(".MultiheadAttention") and node not in seen:
                traps.append(doors.NEED_WEIGHTS)
            yield Finding(node.lineno, ast.unparse(function), door.enter, tuple(traps))
        yield from _hugging_face(node)
    yield from _kept(tree, names, called)


def _kept(tree: ast.Module, names: Names, called: set[ast.expr]) -> Iterator[Finding]:
    """Where torch's SDPA is put somewhere for later."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute | ast.Name) or not isinstance(node.ctx, ast.Load):
            continue
        if node not in called and names.resolve(node) == _SDPA:
            door = doors.DOORS["scaled_dot_product_attention"]
            text = f"{ast.unparse(node)} (kept, not called)"
            yield Finding(node.lineno, text, door.enter, (doors.EARLY_IMPORT,))


def _bound_early(function: ast.expr, path: str, names: Names) -> list[str]:
    early = isinstance(function, ast.Name) and function.id in names.bound
    return [doors.EARLY_IMPORT] if early and path == _SDPA else []


def _hugging_face(call: ast.Call) -> Iterator[Finding]:
    chosen = doors.argument(call, "attn_implementation", None)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "set_attn_implementation":
        chosen = chosen or doors.argument(call, "attn_implementation", 0)
    if chosen is None:
        return
    name = chosen.value if isinstance(chosen, ast.Constant) else ""
    text = f"{ast.unparse(call.func)}(attn_implementation={ast.unparse(chosen)})"
    yield Finding(call.lineno, text, doors.hugging_face(str(name)))


def _module_calls(tree: ast.Module, names: Names) -> Iterator[tuple[ast.Call, ast.Call]]:
    """Each ``nn.MultiheadAttention(...)`` that a class keeps, with each call of it there."""
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        kept: dict[str, ast.Call] = {}
        for node in ast.walk(owner):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                path = names.resolve(node.value.func)
                if path.endswith(".MultiheadAttention") and doors.find(path):
                    kept |= dict.fromkeys(map(ast.unparse, node.targets), node.value)
        for node in ast.walk(owner):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in kept:
                yield kept[ast.unparse(node.func)], node


def _asks_for_weights(calls: Iterable[tuple[ast.Call, ast.Call]]) -> Iterator[Finding]:
    for _, call in calls:
        weights = doors.argument(call, "need_weights", 4)
        unpacked = any(keyword.arg is None for keyword in call.keywords)
        if not unpacked and not (isinstance(weights, ast.Constant) and weights.value is False):
            door = doors.DOORS["MultiheadAttention"]
            yield Finding(call.lineno, ast.unparse(call.func), door.enter, (doors.NEED_WEIGHTS,))


def _subclasses(tree: ast.Module, names: Names) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            path = names.resolve(base)
            if path.endswith(".MultiheadAttention") and doors.find(path):
                text = f"class {node.name}({ast.unparse(base)})"
                yield Finding(node.lineno, text, doors.SUBCLASS, (doors.SUBCLASS_TRAP,))


def doors_for(model: nn.Module) -> list[str]:
    """What the source of the model's own classes calls, and the door for it; one line a door."""
    packages = {type(m): type(m).__module__.partition(".")[0] for m in model.modules()}
    own = {cls for cls, package in packages.items() if package not in ("torch", "flashmod")}
    found: dict[str, list[str]] = {}
    for module in sorted({cls.__module__ for cls in own}):
        classes = [cls for cls in own if cls.__module__ == module]
        for where, finding in _in_source(module, classes):
            found.setdefault(finding.door, []).append(f"{finding.call} ({where})")
    if found:
        return [f"{', '.join(calls)}: {door}" for door, calls in found.items()]
    searched = ", ".join(sorted(cls.__qualname__ for cls in own)) or "torch's own classes"
    return [
        f"no attention of torch or flash-attn is called in the source of {searched}: where it is "
        "written by hand, call flashmod.flash_attention(q, k, v)"
    ]


def _in_source(module: str, classes: Iterable[type]) -> Iterator[tuple[str, Finding]]:
    """Findings in a module's classes and in the functions beside them."""
    loaded = sys.modules.get(module)
    try:
        assert loaded is not None
        text, known = inspect.getsource(loaded), None
        spans = _class_spans(ast.parse(text), {cls.__name__ for cls in classes})
    except (AssertionError, OSError, TypeError, SyntaxError):
        yield from _in_classes(loaded, classes)
        return
    name = Path(str(loaded.__file__)).name
    for finding in scan_source(text, known):
        if spans.get(finding.line, True):
            yield f"{name}:{finding.line}", finding


def _in_classes(
    module: ModuleType | None, classes: Iterable[type]
) -> Iterator[tuple[str, Finding]]:
    """As :func:`_in_source` where only the classes' source is at hand: in a notebook."""
    known = _paths(vars(module)) if module is not None else {}
    for cls in classes:
        try:
            text = inspect.cleandoc(inspect.getsource(cls))
            for finding in scan_source(text, known):
                yield cls.__qualname__, finding
        except (OSError, TypeError, SyntaxError):
            continue


def _class_spans(tree: ast.Module, wanted: set[str]) -> dict[int, bool]:
    """Whether each line that lies in a class lies in one of those wanted."""
    spans: dict[int, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                spans[line] = spans.get(line, False) or node.name in wanted
    return spans


def _paths(namespace: Mapping[str, object]) -> dict[str, str]:
    """Dotted paths of the modules, classes and functions in a namespace."""
    found = {}
    for name, value in namespace.items():
        if value is TORCH_SDPA:
            found[name] = _SDPA
        elif isinstance(value, ModuleType):
            found[name] = value.__name__
        elif isinstance(value, type | FunctionType):
            found[name] = f"{value.__module__}.{value.__qualname__}"
    return found
