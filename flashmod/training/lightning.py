"""The one Lightning of this process, under whichever of its two names it was imported."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

NAMES = ("pytorch_lightning", "lightning.pytorch")


def lightning() -> ModuleType:
    """``pytorch_lightning`` or ``lightning.pytorch``: the one already imported, else the first.

    The two packages hold the same code as different classes, and a Trainer of one refuses the
    modules of the other. So import your Lightning before ``flashmod.training.callbacks``.
    """
    for name in NAMES:
        if name in sys.modules:
            return sys.modules[name]
    return importlib.import_module(NAMES[0])


if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    Callback = lightning().Callback
    LightningModule = lightning().LightningModule
    Trainer = lightning().Trainer

__all__ = ["Callback", "LightningModule", "Trainer", "lightning"]
