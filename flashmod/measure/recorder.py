"""Watch the attention calls of a model and keep one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..functional import dropout_threshold
from ..intercept import Request, intercepting
from .capture import Captured, Tensors, rng_state
from .torch_sdpa import SdpaCall, watching_sdpa


class Recorder:
    """Keeps call number ``layer`` of the latest forward pass, or the latest call when it is None.

    A call without gradients (evaluation, a checkpointed forward) does not replace one that saw a
    backward. Calls inside a call are not looked at.
    """

    def __init__(self, layer: int | None = 0) -> None:
        self.layer = layer
        self.captured: Captured | None = None
        self._count = 0
        self._inside = False
        self._hook: Any = None

    def new_pass(self) -> None:
        self._count = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While active, calls of flashmod and of ``F.scaled_dot_product_attention`` are seen."""
        with intercepting(self._on_request), watching_sdpa(self._on_sdpa):
            try:
                yield
            finally:
                self._forget_hook()

    def _on_request(self, request: Request) -> Any:
        kwargs = dict(request.kwargs)
        rate = kwargs.get("dropout_p", 0.0)
        dropout = isinstance(rate, Tensor) or dropout_threshold(rate)
        ours = request.kind != "sdpa"
        if not self._wanted():
            return self.through(lambda: request.run(request.q, request.k, request.v, **kwargs))
        if dropout and ours and kwargs.get("dropout_seed") is None:
            kwargs["dropout_seed"] = torch.ops.flashmod.seed(request.q.device)
        unknown = None if ours or not dropout else "the dropout of torch's SDPA cannot be repeated"
        state = rng_state(request.q.device) if unknown else None
        result = self.through(lambda: request.run(request.q, request.k, request.v, **kwargs))
        for name in ("return_lse", "return_stats"):
            kwargs.pop(name, None)
        captured = Captured(
            request.kind, request.run, *_detached(request.q, request.k, request.v), kwargs, unknown
        )
        self._keep(captured, result[0] if isinstance(result, tuple) else result, state)
        return result

    def _on_sdpa(self, call: SdpaCall) -> Any:
        if self._inside:
            return call.original()
        if not self._wanted():
            return call.original()
        state = rng_state(call.q.device) if call.dropout_p else None
        result = call.original()
        q, k, v = _detached(*call.operands())
        captured = Captured("torch", call.repeat, q, k, v, call.kwargs(), call.unknown())
        self._keep(captured, result, state, call.to_rows)
        return result

    def _wanted(self) -> bool:
        if self._inside:
            return False
        number, self._count = self._count, self._count + 1
        if self.layer is not None and number != self.layer:
            return False
        trained = self.captured is not None and self.captured.grad_out is not None
        return torch.is_grad_enabled() or not trained

    def through(self, run: Callable[[], Any]) -> Any:
        """``run()``, without looking at the calls that it makes."""
        outer, self._inside = self._inside, True
        try:
            return run()
        finally:
            self._inside = outer

    def _keep(
        self,
        captured: Captured,
        out: Tensor,
        state: Tensor | None,
        to_rows: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        kind = captured.q.device.type
        captured.rng_state = state
        if torch.is_autocast_enabled(kind):
            captured.autocast = torch.get_autocast_dtype(kind)
        self._forget_hook()
        self.captured = captured
        if out.requires_grad:

            def keep_grad(grad: Tensor) -> None:
                captured.grad_out = to_rows(grad.detach())

            self._hook = out.register_hook(keep_grad)

    def _forget_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _detached(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    return q.detach(), k.detach(), v.detach()
