"""Choose the backend of a call; say why when none fits. A request by name never falls back."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from torch import Tensor

from .spec import AttentionCall, Forward, Gradients, TileConfig

NAMES = ("triton", "tiled")  # in order of preference


class Backend(Protocol):
    """What a backend module offers. Shapes as in :mod:`flashmod.ops`."""

    def unsupported_reasons(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> list[str]:
        """Why this backend cannot run the call; empty when it can."""

    def forward_tiles(self, q: Tensor, v: Tensor, call: AttentionCall) -> TileConfig:
        """The tile sizes of :meth:`forward`, which its statistics are laid out by."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Forward:
        """Output, lse, and what the backward pass and ``call.collect_stats`` ask for."""

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        saved: Tensor,
        call: AttentionCall,
        mask_grad: bool,
    ) -> Gradients:
        """Gradients in the shapes and dtypes of the inputs, that of ``attn_mask`` if asked."""


class UnsupportedAttention(NotImplementedError):
    """No backend, or not the one asked for, can run a call; the message lists every reason."""


def load(name: str) -> Backend:
    """Import a backend by name; ImportError when what it needs is missing."""
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)} or None, got {name!r}")
    return cast(Backend, import_module(f"{__package__}.backends.{name}"))


def refusals(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> dict[str, list[str]]:
    """Why each backend refuses the call, in order of preference; empty where it takes it."""
    answers: dict[str, list[str]] = {}
    for name in [call.backend] if call.backend else NAMES:
        if not call.backend and name == "triton" and q.device.type == "cpu":
            answers[name] = [
                "a CPU tensor takes the torch tiles unless backend='triton' is asked for"
            ]
            continue
        try:
            answers[name] = load(name).unsupported_reasons(q, k, v, call)
        except ImportError as error:
            answers[name] = [f"cannot be imported: {error}"]
    return answers


def choose_backend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Backend:
    """The backend that runs the call.

    Raises:
        UnsupportedAttention: with every backend's reasons.
    """
    answers = refusals(q, k, v, call)
    for name, reasons in answers.items():
        if not reasons:
            return load(name)
    listed = "\n".join(f"  {name}: {'; '.join(reasons)}" for name, reasons in answers.items())
    raise UnsupportedAttention(f"no attention backend can run this call\n{listed}")
