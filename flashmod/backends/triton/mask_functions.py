"""Registered mask functions as device functions that compute what they compute on tensors."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import triton

from ...masks import registered_mask_fn
from ...spec import bind
from .device_rules import DEVICE_NAMES


@cache
def compiled_mask_fn(key: str) -> Any:
    """The function registered under ``key``; one object per key, or every call would compile."""
    fn = _floored(registered_mask_fn(key), key)
    return getattr(bind(DEVICE_NAMES, triton.jit, {fn.__name__: fn}), fn.__name__)


class _Floor(ast.NodeTransformer):
    """``//`` and ``%`` round down in Python and torch, but towards zero in Triton."""

    names = {ast.FloorDiv: "floor_divide", ast.Mod: "floor_modulo"}  # noqa: RUF012

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = self.names.get(type(node.op))
        if name is None:
            return node
        return ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])


def _floored(fn: Callable[..., Any], key: str) -> Callable[..., Any]:
    """The function rewritten; its source is put where ``inspect``, and so Triton, finds it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list, definition.returns = [], None
    for argument in (*definition.args.posonlyargs, *definition.args.args):
        argument.annotation = None
    source = ast.unparse(ast.fix_missing_locations(_Floor().visit(tree))) + "\n"
    file = f"<flashmod mask function {key}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {}
    exec(compile(source, file, "exec"), scope)
    made: Callable[..., Any] = scope[definition.name]
    made.__module__, made.__qualname__ = fn.__module__, fn.__qualname__
    return made
