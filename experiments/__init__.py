"""Thin entry points; in the wheel this is the package flashmod.experiments."""
