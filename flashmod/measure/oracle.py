"""Dense float64 attention on the CPU in blocks of query rows: linear memory, any sample of rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..functional import Prepared
from ..numerics import Errors, Results, largest, largest_product
from ..spec import AttentionCall, Span, on_ints, spans

_BLOCK_SCORES = 1 << 22  # score entries of all heads in one block
_PROBE_ROWS = 16


class Oracle:
    """The truth about one prepared call, for all query rows of its sequences or a sample of them.

    Args:
        ready: q (B, S, H, D), k, v and the call; copied to the CPU, q, k and v in float64.
        grad_out: (B, S, H, D_v), the gradient of the output.

    Attributes:
        spans: the sequences that have queries.
    """

    def __init__(self, ready: Prepared, grad_out: Tensor) -> None:
        # Promoted row by row where they are read: a bias may be quadratic.
        call: list[Any] = [x.detach().cpu() if isinstance(x, Tensor) else x for x in ready.call]
        self.call = AttentionCall(*call)
        self.q, self.k, self.v = (_exact(x) for x in ready[:3])
        self.grad_out = _exact(grad_out)
        self.spans = [s for s in spans(self.call, self.q, self.k) if s.limits.q_len]
        self._clear()

    def num_rows(self) -> int:
        return sum(span.limits.q_len for span in self.spans)

    def sample(self, share: float, seed: int) -> list[Tensor]:
        """Ascending query rows of every sequence, at least one of each; all of them for 1."""
        generator = torch.Generator().manual_seed(seed)
        chosen = []
        for span in self.spans:
            length = span.limits.q_len
            count = max(1, round(share * length))
            chosen.append(torch.randperm(length, generator=generator)[:count].sort().values)
        return chosen

    def affordable_share(self, time_limit_s: float) -> float:
        """The share of rows, 1 or a power of 1/2, that :meth:`run` checks in about that time."""
        work = [self._work(span, torch.arange(span.limits.q_len)) for span in self.spans]
        if not sum(work):
            return 1.0
        span = self.spans[work.index(max(work))]
        probe = torch.arange(max(0, span.limits.q_len - _PROBE_ROWS), span.limits.q_len)
        seconds = []
        for _ in range(2):  # the first also warms up
            start = time.perf_counter()
            self._add(span, probe)
            seconds.append(time.perf_counter() - start)
        self._clear()
        needed = min(seconds) * sum(work) / max(1, self._work(span, probe))
        share = 1.0
        while share * needed > time_limit_s and share * self.num_rows() > len(self.spans):
            share /= 2
        return share

    def run(self, chosen: list[Tensor]) -> tuple[Results, Errors]:
        """Results when only the chosen rows have a gradient, and the unit of each.

        The output is zero in the other rows; dq, dk and dv are exact.
        """
        self._clear()
        row_grad = 0.0
        for span, rows in zip(self.spans, chosen, strict=True):
            row_grad = max(row_grad, largest(self.grad_out[span.q_rows][rows]))
            for block in self._blocks(span, rows):
                self._add(span, block)
        q, k, v = (
            max((largest(x[s.q_rows if x is self.q else s.kv_rows]) for s in self.spans), default=0)
            for x in (self.q, self.k, self.v)
        )
        slope = abs(self.call.scale) * self._largest_dp
        return self._results, Errors(v, slope * k, slope * q, row_grad)

    def _clear(self) -> None:
        like = (self.grad_out, self.q, self.k, self.v)
        self._results = Results(*(torch.zeros(x.shape, dtype=x.dtype) for x in like))
        self._largest_dp = 0.0

    def _add(self, span: Span, rows: Tensor) -> None:
        """Add the output and the gradients of some rows of one sequence to the results."""
        seen = span._replace(kv_len=_end_key(span, rows))  # no row sees a later key
        q = self.q[span.q_rows][rows].requires_grad_()
        k, v = (x[seen.kv_rows].clone().requires_grad_() for x in (self.k, self.v))
        grad = self.grad_out[span.q_rows][rows]
        with torch.enable_grad():
            out, _ = reference.attend_rows(q, k, v, self.call, seen, rows)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
        results = self._results
        results.out[span.q_rows].index_copy_(0, rows, out.detach())
        results.dq[span.q_rows].index_copy_(0, rows, dq)
        results.dk[seen.kv_rows] += dk
        results.dv[seen.kv_rows] += dv
        self._largest_dp = max(self._largest_dp, largest_product(grad, v))

    def _work(self, span: Span, rows: Tensor) -> int:
        return sum(len(block) * _end_key(span, block) for block in self._blocks(span, rows))

    def _blocks(self, span: Span, rows: Tensor) -> Iterator[Tensor]:
        yield from rows.split(max(1, _BLOCK_SCORES // max(1, span.kv_len * self.q.shape[2])))


def _exact(x: Tensor) -> Tensor:
    return x.detach().cpu().double()


def _end_key(span: Span, rows: Tensor) -> int:
    """End of the keys that some of the ascending ``rows`` see; at least one, if there is any."""
    _, end = on_ints.key_range(int(rows[0]), int(rows[-1]), span.limits)
    return min(span.kv_len, max(1, end))
