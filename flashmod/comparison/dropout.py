"""Switch the dropout of any model off, for a comparison of its numbers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def switch_off(model: nn.Module) -> list[str]:
    """Set every rate of an active module to 0 and name those that were not.

    A rate is ``p`` of torch's dropout modules, and an attribute with ``drop`` in its name that is
    a number in (0, 1]: ``nn.MultiheadAttention.dropout``, ``attn_drop``, ``drop_prob``.
    """
    changed = []
    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            rate = (isinstance(module, _DropoutNd) and attribute == "p") or "drop" in attribute
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if module.training and rate and number and 0 < value <= 1:
                setattr(module, attribute, 0.0)
                changed.append(f"{name}.{attribute}" if name else attribute)
    return changed
