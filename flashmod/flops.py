"""FLOP formulas of the attention ops, for ``torch.utils.flop_counter.FlopCounterMode``.

That module imports triton, which ``import flashmod`` must not, so the formulas are registered when
somebody imports it.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .spec import AttentionCall

_COUNTER = "torch.utils.flop_counter"


def register_flops() -> None:
    """Give torch's counter the formulas: now if it is loaded, else as soon as it is."""
    if _COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenImported(_COUNTER, _register))


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for op, formula in (
        (torch.ops.flashmod.attention_forward, _forward_flops),
        (torch.ops.flashmod.attention_backward, _backward_flops),
    ):
        register_flop_formula(op, get_raw=True)(formula)


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *call: Any, **kwargs: Any) -> int:
    pairs = _pairs(q, k, AttentionCall(*call))
    return 2 * pairs * q.shape[2] * (q.shape[3] + v.shape[3])


def _backward_flops(*args: Any, **kwargs: Any) -> int:
    _, _, q, k, v, _, _, _, *call = args
    pairs = _pairs(q, k, AttentionCall(*call))
    return 2 * pairs * q.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])


def _pairs(q: Tensor, k: Tensor, call: AttentionCall) -> int:
    """Query-key pairs of one head, masks not counted (as torch's own formulas do)."""
    lengths = call.q_lengths
    if isinstance(lengths, Tensor) and not isinstance(lengths, torch._subclasses.FakeTensor):
        return int((lengths.long() * call.kv_lengths.long()).sum())
    return int(q.shape[0] * q.shape[1] * k.shape[1])


class _WhenImported(MetaPathFinder):
    """Run ``then`` once, right after module ``name`` is first imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_then(module: ModuleType) -> None:
                run(module)
                self.then()

            spec.loader.exec_module = run_then  # type: ignore[method-assign]
        return spec
