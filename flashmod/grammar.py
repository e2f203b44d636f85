"""The grammar of leaf functions: one Python source for ints, tensors and kernels."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_FREE_NAMES = ("maximum", "minimum", "where")
_REMEDY = {
    ast.BoolOp: "write & or | between parenthesised comparisons",
    ast.Not: "write ~(...)",
    ast.IfExp: "write where(condition, a, b)",
    ast.If: "write where(condition, a, b)",
    ast.Lambda: "write a def",
    ast.Call: "only maximum, minimum and where may be called",
    ast.Attribute: "use operators on the arguments only",
    ast.AugAssign: "write x = x + y: in place would change the positions of the caller",
    ast.Subscript: "hand numbers in through fn_args",
}
_ALLOWED = (
    ast.BinOp, ast.UnaryOp, ast.Compare, ast.Name, ast.Constant, ast.Tuple, ast.Assign,
    ast.Return,
    ast.operator, ast.unaryop, ast.cmpop, ast.expr_context, ast.Expr, ast.arguments, ast.arg,
)  # fmt: skip


def grammar_offences(
    fn: Callable[..., Any], *, calls: Sequence[str] = (), structs: bool = False
) -> Iterator[str]:
    """What keeps ``fn`` from being a leaf function: made of operators, usable by every backend.

    Args:
        calls: further functions that may be called.
        structs: allow fields and items of the arguments (the library's own rules use them).
    """
    if getattr(fn, "__name__", "") == "<lambda>":
        yield "it is a lambda: write a def"
        return
    if inspect.ismethod(fn):
        yield "it is a method: write a def outside the class"
        return
    if getattr(fn, "__closure__", None):
        names = ", ".join(fn.__code__.co_freevars)
        yield f"it closes over {names}: hand numbers in through fn_args"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError):
        yield "its source cannot be read: define it in a file or a notebook cell"
        return
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        yield f"it is a {type(definition).__name__}, not a def"
        return
    parameters = definition.args
    known = {a.arg for a in (*parameters.posonlyargs, *parameters.args)} | (
        {parameters.vararg.arg} if parameters.vararg else set()
    )
    known |= {
        n.id
        for n in ast.walk(definition)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    for default in parameters.defaults:
        if not isinstance(default, ast.Constant):
            yield f"the default {ast.unparse(default)} is no number: hand it in through fn_args"
    if not isinstance(definition.body[-1], ast.Return):
        yield "it does not end in a return"
    callable_names = {*_FREE_NAMES, *calls}
    for statement in definition.body:
        yield from _node_offences(statement, known, callable_names, structs)


def _node_offences(
    node: ast.AST, known: set[str], callable_names: set[str], structs: bool
) -> Iterator[str]:
    line = f"line {getattr(node, 'lineno', '?')}"
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in callable_names
    ):
        if node.keywords:
            yield f"{line}: {node.func.id} takes its arguments without keywords"
        for argument in node.args:
            yield from _node_offences(argument, known, callable_names, structs)
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in known:
        yield f"{line}: {node.id!r} comes from outside: hand numbers in through fn_args"
        return
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        yield f"{line}: chained comparison: write (a < b) & (b < c)"
    if isinstance(node, ast.Compare) and any(
        isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot) for op in node.ops
    ):
        yield f"{line}: 'in' and 'is' do not work on tensors: compare with =="
    if isinstance(node, ast.Assign) and len(node.targets) > 1:
        yield f"{line}: write one name in an assignment"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.MatMult):
        yield f"{line}: {type(node.op).__name__}: kernels have no such operator: write x * x"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
        yield f"{line}: leave the + out"
    if isinstance(node, ast.Not) or not (
        isinstance(node, _ALLOWED) or (structs and isinstance(node, ast.Attribute | ast.Subscript))
    ):
        remedy = next(
            (text for kind, text in _REMEDY.items() if isinstance(node, kind)), "use operators only"
        )
        yield f"{line}: {type(node).__name__}: {remedy}"
        return
    for child in ast.iter_child_nodes(node):
        yield from _node_offences(child, known, callable_names, structs)
