"""The rules of attention as device functions."""

import triton
import triton.language as tl

from ...spec import bind


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b)


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _floor_modulo(a, b):
    """``a % b`` with the sign of ``b``, as in Python and torch; Triton's has that of ``a``."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def _floor_divide(a, b):
    """``a // b`` rounded down, as in Python and torch; Triton rounds towards zero."""
    if (a + b).dtype.is_floating():
        return tl.floor(a / b)
    else:
        quotient = a // b
        rest = a - quotient * b
        return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)


# The interpreter asks that `tl` be visible from every device function.
DEVICE_NAMES = {
    "maximum": _maximum,
    "minimum": _minimum,
    "where": _where,
    "exp": _exp,
    "floor_modulo": _floor_modulo,
    "floor_divide": _floor_divide,
    "tl": tl,
}
_rules = bind(DEVICE_NAMES, compiled=triton.jit)
diagonal_shift = _rules.diagonal_shift
key_interval = _rules.key_interval
is_visible = _rules.is_visible
key_range = _rules.key_range
full_key_range = _rules.full_key_range
query_range = _rules.query_range
full_query_range = _rules.full_query_range
split_tiles = _rules.split_tiles
soft_cap = _rules.soft_cap
soft_cap_slope = _rules.soft_cap_slope
alibi = _rules.alibi
keep_scale = _rules.keep_scale
dropout_head_key = _rules.dropout_head_key
dropout_row_key = _rules.dropout_row_key
dropout_pair = _rules.dropout_pair
dropout_pair_key = _rules.dropout_pair_key
dropout_word = _rules.dropout_word
dropout_bits = _rules.dropout_bits
