"""What FlashMultiheadAttention holds beside the state of ``nn.MultiheadAttention``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .masks import Mask
from .spec import TileConfig


class Options(NamedTuple):
    """What torch's module does not know; each default is what torch's module does.

    Attributes:
        num_kv_heads: key and value heads, each shared by ``num_heads / num_kv_heads`` query heads;
            ``in_proj_weight`` is then (E + 2 * num_kv_heads * head_dim, E). Default ``num_heads``.
        mask: who may attend to whom.
        softcap: squeeze scores into (-softcap, softcap); 0 is off.
        alibi: True for the standard slopes, or slopes (H,), a buffer outside the state dict.
        sink: whether a parameter ``sink`` (H,), at first 0, joins every softmax as a logit.
        need_weights: False never computes the quadratic weights and returns None for them.
        always_call: have torch's encoder layers call the module in eval mode too, instead of
            running their own fused code. A module that differs from torch's is always called.
        backend, tiles: as in :func:`flashmod.flash_attention`.
    """

    num_kv_heads: int | None = None
    mask: Mask | None = None
    softcap: float = 0
    alibi: bool | Tensor = False
    sink: bool = False
    need_weights: bool | None = None
    always_call: bool = False
    backend: str | None = None
    tiles: TileConfig | None = None


_ATTRIBUTES = ("mask", "softcap", "need_weights", "always_call", "backend", "tiles")


class OptionalFeatures(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with :class:`Options`, which may be put on and taken off again."""

    num_kv_heads: int
    mask: Mask | None
    softcap: float
    alibi: bool
    alibi_slopes: Tensor | None
    sink: nn.Parameter | None
    need_weights: bool | None
    always_call: bool
    backend: str | None
    tiles: TileConfig | None
    drops: bool  # whether dropout is not 0: Dynamo makes an input of every float that it meets

    def configure(self, options: Options) -> None:
        """Give a module that has torch's state these options.

        Raises:
            TypeError, ValueError: an option does not fit; nothing was changed then.
        """
        _check(options, self)
        self.num_kv_heads = options.num_kv_heads or self.num_heads
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(options, name))
        self.drops = bool(self.dropout)
        given = options.alibi if isinstance(options.alibi, Tensor) else None
        self.alibi = given is not None or bool(options.alibi)
        like = self.out_proj.weight
        slopes = None if given is None else given.detach().to(like.device)
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        sink = nn.Parameter(like.new_zeros(self.num_heads)) if options.sink else None
        self.register_parameter("sink", sink)
        if self.num_kv_heads != self.num_heads:
            self._shrink_keys()
        self._keep_called()

    def unconfigure(self) -> None:
        """Take every option off: what is left is the state of ``nn.MultiheadAttention``.

        Raises:
            ValueError: a parameter has no place there; nothing was changed then.
        """
        parameter = self.beyond_torch()
        if parameter is not None:
            raise ValueError(f"{parameter} has no place in nn.MultiheadAttention")
        self._hook(False)
        for name in (*_ATTRIBUTES, "num_kv_heads", "drops", "alibi", "alibi_slopes", "sink"):
            delattr(self, name)

    def beyond_torch(self) -> str | None:
        """The name of a parameter that ``nn.MultiheadAttention`` cannot hold, if there is one."""
        if self.num_kv_heads != self.num_heads:
            return "in_proj_weight"
        return None if self.sink is None else "sink"

    @property
    def always_called(self) -> bool:
        """Whether torch's encoder layers call the module in eval mode too."""
        return _always_call in self._forward_pre_hooks.values()

    def slopes(self, device: torch.device) -> Tensor | None:
        """ALiBi's slopes (H,), if it is on."""
        if not self.alibi or self.alibi_slopes is not None:
            return self.alibi_slopes
        return standard_slopes(self.num_heads, device)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "sink" not in self.__dict__.get("_parameters", ()):  # not configured
            return
        if name == "dropout":
            self.drops = bool(value)
        elif name in _ATTRIBUTES:
            self._keep_called()

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        sink = self._parameters.get("sink")
        if sink is not None:
            nn.init.zeros_(sink)

    def _keep_called(self) -> None:
        """Be called where torch's fused encoder layer would give something else."""
        differs = (
            self.always_call, self.mask is not None, self.softcap, self.alibi,
            self.sink is not None, self.num_kv_heads != self.num_heads, self.backend, self.tiles,
            self.bias_k is not None, self.add_zero_attn,
        )  # fmt: skip
        self._hook(any(differs))

    def _hook(self, wanted: bool) -> None:
        """torch's encoder layers skip an attention module in eval mode unless it has a hook."""
        hooks = self._forward_pre_hooks
        if wanted and not self.always_called:
            self.register_forward_pre_hook(_always_call)
        elif not wanted:
            for key in [key for key, hook in hooks.items() if hook is _always_call]:
                del hooks[key]

    def _shrink_keys(self) -> None:
        kv_dim = self.num_kv_heads * self.head_dim
        rows, like = self.embed_dim + 2 * kv_dim, self.in_proj_weight
        self.in_proj_weight = nn.Parameter(like.new_empty(rows, self.embed_dim))
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            self.in_proj_bias = nn.Parameter(like.new_zeros(rows))
        if self.bias_k is not None:
            self.bias_k, self.bias_v = (
                nn.Parameter(nn.init.xavier_normal_(like.new_empty(1, 1, kv_dim))) for _ in "kv"
            )


def standard_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """(heads,) float32, ALiBi's own (Press et al. 2022): ``2 ** (-8 * i / heads)`` for i from 1.

    Where ``heads`` is no power of two, n is the next lower one, and the rest are every other of
    those for ``2 * n``.
    """
    n = 1 << heads.bit_length() - 1
    lower = torch.arange(1, n + 1, device=device) * (-8 / n)
    between = (2 * torch.arange(heads - n, device=device) + 1) * (-4 / n)
    return torch.cat([lower, between]).exp2()


def _check(options: Options, module: nn.MultiheadAttention) -> None:
    heads, groups, alibi = module.num_heads, options.num_kv_heads, options.alibi
    if not isinstance(options.mask, Mask | None):
        raise TypeError(
            f"mask must be a Mask or None, got {options.mask!r}: e.g. Mask(causal=True)"
        )
    if options.need_weights:
        raise ValueError("need_weights must be False or None: callers ask for weights themselves")
    if not isinstance(alibi, bool | Tensor):
        raise TypeError(f"alibi must be True, False or a tensor of slopes, got {alibi!r}")
    if isinstance(alibi, Tensor) and (alibi.shape != (heads,) or alibi.requires_grad):
        raise ValueError(
            f"alibi must be ({heads},) slopes without gradient, got shape {tuple(alibi.shape)}, "
            f"requires_grad={alibi.requires_grad}"
        )
    if groups is None or groups == heads:
        return
    if groups < 1 or heads % groups:
        raise ValueError(f"num_kv_heads must divide num_heads, got {groups} and {heads}")
    if not module._qkv_same_embed_dim:
        raise ValueError(f"num_kv_heads={groups} needs kdim and vdim equal to embed_dim")


def _always_call(module: nn.Module, inputs: Any) -> None:
    """A hook that does nothing: torch's encoder layers call a module that has one."""
