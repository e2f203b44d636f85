"""Compile every kernel for any GPU with no GPU present, and read what the compiler made of it."""

from .offline import TARGETS, Compiled, Target, compiling_for, require_compiler
from .reading import Facts, read

__all__ = ["TARGETS", "Compiled", "Facts", "Target", "compiling_for", "read", "require_compiler"]
