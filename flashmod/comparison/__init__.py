"""Proof on one's own model, and what its padding costs."""

from .comparing import compare
from .padding import PaddingReport, padding_report
from .results import Comparison, Setting, Sides

__all__ = ["Comparison", "PaddingReport", "Setting", "Sides", "compare", "padding_report"]
