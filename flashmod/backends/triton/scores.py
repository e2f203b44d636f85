"""What a product of a query and a key becomes: the one place that knows soft cap, ALiBi and bias.

``LINEAR`` says that a logit is its product times a scale. Products are then compared as they are,
and the scale is folded into the exponent, so that the plain path pays for nothing else.
"""

import triton
import triton.language as tl

from .arguments import Scores
from .device_rules import alibi, soft_cap, soft_cap_slope

LOG2_E = tl.constexpr(1.4426950408889634)
# A bias of the most negative float32 is finite, and stays so in base 2.
_LOWEST = tl.constexpr(-(2.0**127))


@triton.jit
def head_scores(score, sequence, head, scale, LINEAR: tl.constexpr):
    """What makes the logits of one head of one sequence.

    Args:
        scale: of products, in base 2, in the accumulation dtype.
    """
    unit, cap, slope = scale, scale, scale
    if not LINEAR:
        unit = tl.full((), 1.0, scale.dtype)
    if score.cap is not None:
        cap = (tl.full((), score.cap, scale.dtype) + score.cap_rest) * LOG2_E
    if score.slopes is not None:
        at = sequence.n.to(tl.int64) * score.slope_stride + head
        slope = tl.load(score.slopes + at) * LOG2_E
    return Scores(scale, unit, cap, slope)


@triton.jit
def logits(products, bias, q_idx, kv_idx, head, LINEAR: tl.constexpr):
    """Logits in multiples of ``head.scores.unit``, and their derivative after the scale.

    Args:
        products: (M, N), or transposed.
        bias: what ``attn_mask`` holds; of no use where that is not floating-point.
        q_idx, kv_idx: positions, which broadcast to the products.
    Returns:
        The derivative is that of the soft cap, and of no use without.
    """
    terms = head.scores
    slope = products
    if not LINEAR:
        products = products * terms.scale
    if head.arg.cap is not None:
        products = soft_cap(products, terms.cap)
        slope = soft_cap_slope(products, terms.cap)
    if head.arg.slopes is not None:
        products -= alibi(q_idx, kv_idx, terms.slope, head.sequence.limits)
    if bias.dtype.is_floating():
        products += tl.maximum(bias.to(products.dtype) * LOG2_E, _LOWEST)
    return products, slope


@triton.jit
def finish_rows(row_max, row_sum, sequence, head, score):
    """Let the sink of a head join the denominators of its rows.

    Args:
        row_max, row_sum: (M,), base 2; -inf and 0 for rows that see no key.
    Returns:
        The same with the sink, 1 in place of a sum of 0, and what outputs are to be multiplied by.
    """
    factor = row_max
    if score.sink is not None:
        at = sequence.q_batch.to(tl.int64) * score.sink_stride + head
        sink = tl.load(score.sink + at).to(row_max.dtype) * LOG2_E
        joined = tl.maximum(row_max, sink)
        pivot = tl.where(joined == float("-inf"), 0.0, joined)
        factor = tl.exp2(row_max - pivot)
        row_sum = row_sum * factor + tl.exp2(sink - pivot)
        row_max = joined
    row_sum = tl.where(row_max == float("-inf"), 1.0, row_sum)
    if score.sink is not None:
        factor = factor / row_sum
    else:
        factor = 1.0 / row_sum
    return row_max, row_sum, factor
