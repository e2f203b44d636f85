"""What the names of one Python file stand for, as far as its text tells."""

from __future__ import annotations

import ast
from collections.abc import Mapping

_WRAPPERS = {"torch.compile", "torch.compiler.disable", "functools.partial"}


class Names:
    """Dotted paths behind the names of a file: imports of any scope, and plain aliases.

    Args:
        tree: the parsed file.
        known: names that something else defines, with their dotted paths.

    Attributes:
        bound: names that were bound to a function by import or assignment, with their lines.
    """

    def __init__(self, tree: ast.Module, known: Mapping[str, str] | None = None) -> None:
        self._known = dict(known or {})
        self._stars: list[str] = []
        self.bound: dict[str, int] = {}
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self._known.setdefault(node.name, f".{node.name}")
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._alias(node.targets[0], node.value)

    def resolve(self, node: ast.expr) -> str:
        """Dotted path of an expression; it starts with ``?`` where its base is not known.

        ``torch.compile(f)`` and ``functools.partial(f, ...)`` count as ``f``.
        """
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.resolve(node.value)}.{node.attr}"
        if isinstance(node, ast.Call) and node.args and self.resolve(node.func) in _WRAPPERS:
            return self.resolve(node.args[0])
        return "?"

    def wraps(self, call: ast.Call) -> bool:
        """Whether ``call`` only wraps a function, as ``torch.compile(f)`` does."""
        return self.resolve(call.func) in _WRAPPERS

    def _name(self, name: str) -> str:
        if name in self._known:
            return self._known[name]
        return f"{self._stars[-1]}.{name}" if self._stars else f"?{name}"

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            self._known[alias.asname or root] = alias.name if alias.asname else root

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            if alias.name == "*":
                self._stars.append(module)
                continue
            name = alias.asname or alias.name
            self._known[name] = f"{module}.{alias.name}"
            self.bound[name] = node.lineno

    def _alias(self, target: ast.expr, value: ast.expr) -> None:
        path = self.resolve(value)
        if isinstance(target, ast.Name) and "?" not in path and "." in path:
            self._known[target.id] = path
            self.bound.setdefault(target.id, target.lineno)
