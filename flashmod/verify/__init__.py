"""The checks with which anyone verifies the library; ``flashmod-verify`` runs them."""

from .rows import Row, Target
from .suite import NAMES, Suite, descriptions

__all__ = ["NAMES", "Row", "Suite", "Target", "descriptions"]
