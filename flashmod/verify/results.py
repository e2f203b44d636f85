"""Run a batch through a backend and through the definition, and how far they may differ."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import numerics
from ..functional import flash_attention
from ..spec import TileConfig
from . import truth
from .batches import Batch
from .context import Runner


class Results(NamedTuple):
    """What a call gives; None for what it has not."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None

    def errors(self, reference: Results, units: dict[str, float]) -> dict[str, float]:
        """:func:`flashmod.numerics.error` of every result that exists."""
        triples = zip(self._fields, self, reference, strict=True)
        return {
            name: numerics.error(x, y, units[name])
            for name, x, y in triples
            if x is not None and y is not None
        }


def run(batch: Batch, runner: Runner, tiles: TileConfig | None = None) -> Results:
    """The results of a backend, on the CPU."""
    batch = batch.on(runner.device)
    leaves = _Leaves(batch)
    kwargs = batch.arguments()
    kwargs |= {"attn_mask": leaves.attn_mask, "learnable_sink": leaves.sink}
    out, lse = flash_attention(
        leaves.q, leaves.k, leaves.v, **kwargs, return_lse=True, backend=runner.name, tiles=tiles
    )
    return leaves.results(out, lse, (out, lse), (batch.grad_out, batch.grad_lse))


def definition(batch: Batch, dtype: torch.dtype = torch.float64, gradients: bool = True) -> Results:
    """The same results by :mod:`flashmod.verify.truth`, computed in ``dtype``.

    Args:
        gradients: otherwise they are zero.
    """
    batch = batch.to(dtype)
    spec, leaves = batch.spec, _Leaves(batch)
    batch = batch._replace(attn_mask=leaves.attn_mask, sink=leaves.sink)
    out = torch.zeros(batch.grad_out.shape, dtype=dtype)
    lse = torch.full(batch.grad_lse.shape, float("-inf"), dtype=batch.grad_lse.dtype)
    value = leaves.q[:0].sum()  # 0, and differentiable when every sequence is empty
    for n in range(spec.num_sequences):
        q_rows, kv_rows = batch.rows(n, spec.q_lens), batch.rows(n, spec.kv_lens)
        own, own_lse = truth.attend(
            leaves.q[q_rows], leaves.k[kv_rows], leaves.v[kv_rows], batch.sequence(n)
        )
        lse_rows = (..., q_rows) if spec.packed else (n, ..., q_rows[1])
        out[q_rows], lse[lse_rows] = own.detach(), own_lse.detach().to(lse.dtype)
        finite = own_lse.masked_fill(own_lse == float("-inf"), 0.0)
        value = value + (own * batch.grad_out[q_rows]).sum()
        value = value + (finite * batch.grad_lse[lse_rows]).sum()
    if not gradients:
        value = leaves.q[:0].sum()
    return leaves.results(out, lse, value, None)


class _Leaves:
    """Copies of what is differentiated, and their gradients."""

    def __init__(self, batch: Batch):
        def leaf(x: Tensor) -> Tensor:  # with the strides of x
            return x.detach().clone().requires_grad_()

        self.q, self.k, self.v = leaf(batch.q), leaf(batch.k), leaf(batch.v)
        self.sink = None if batch.sink is None else leaf(batch.sink)
        self.attn_mask = self.bias = None
        if batch.attn_mask is not None and batch.attn_mask.dtype == torch.bool:
            self.attn_mask = batch.attn_mask
        elif batch.attn_mask is not None:
            self.attn_mask = self.bias = leaf(batch.attn_mask)

    def results(self, out: Tensor, lse: Tensor, of: Any, grads: Any) -> Results:
        """Results on the CPU, with the gradients of ``of``, which itself has those of ``grads``."""
        operands = (self.q, self.k, self.v, self.bias, self.sink)
        wanted = [x for x in operands if x is not None]
        found = iter(torch.autograd.grad(of, wanted, grads, materialize_grads=True))
        dq, dk, dv, dbias, dsink = (None if x is None else next(found).cpu() for x in operands)
        assert dq is not None and dk is not None and dv is not None
        return Results(out.detach().cpu(), lse.detach().cpu(), dq, dk, dv, dbias, dsink)


def units(batch: Batch) -> dict[str, float]:
    """The unit of every result: the size of the terms that it is a sum of."""
    q, k, v, grad = (
        x.double().nan_to_num(0.0).flatten(0, -3)
        for x in (batch.q, batch.k, batch.v, batch.grad_out)
    )
    unit = numerics.units(q, k, v, grad, batch.scale)
    slope = numerics.largest_product(grad, v)
    lse = numerics.largest(batch.grad_lse)
    return {
        "out": unit.out, "lse": 1.0, "dv": unit.dv,
        "dq": unit.dq + lse * batch.scale * numerics.largest(k),
        "dk": unit.dk + lse * batch.scale * numerics.largest(q),
        "dbias": slope + lse, "dsink": slope + lse,
    }  # fmt: skip
