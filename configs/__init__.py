"""Hydra configs; in the wheel, and for Hydra, this is the package flashmod.configs."""
