"""The rules of attention: who sees whom, what a score becomes, which weights are dropped.

Every rule is a *leaf* function made of operators and the free names ``maximum``, ``minimum``,
``where`` and ``exp``. :func:`flashmod.spec.bind` supplies those names for Python numbers, torch
tensors and Triton blocks, so one source runs in the reference, the torch tiles and the kernels.

Positions are local to a sequence. ``limits`` is a :class:`flashmod.spec.Limits`. Both ends of
a query's key interval grow with the query, which is what makes the tile ranges closed forms.
"""


def diagonal_shift(q_len, kv_len, align):
    """Key position facing query 0: ``align`` 1 is bottom-right, 0 is top-left."""
    return align * (kv_len - q_len)


def key_interval(q_idx, limits):
    """Keys ``[lo, hi)`` that query ``q_idx`` may see; none past ``q_len``."""
    diagonal = q_idx + limits.shift
    lo = maximum(limits.first_key, diagonal - limits.window_left)
    hi = minimum(limits.end_key, maximum(limits.prefix_len, diagonal + limits.window_right + 1))
    return lo, where(q_idx < limits.q_len, hi, 0)


def is_visible(kv_idx, lo, hi):
    """Whether key ``kv_idx`` lies in the interval ``[lo, hi)``."""
    return (kv_idx >= lo) & (kv_idx < hi)


def key_range(q_first, q_last, limits):
    """Keys that some query of ``q_first..q_last`` sees; no other key need be loaded."""
    lo, unused_hi = key_interval(q_first, limits)
    unused_lo, hi = key_interval(q_last, limits)
    return lo, maximum(lo, hi)


def full_key_range(q_first, q_last, limits):
    """Keys that every query of ``q_first..q_last`` sees: no mask is needed there."""
    unused_lo, hi = key_interval(q_first, limits)
    lo, unused_hi = key_interval(q_last, limits)
    return lo, maximum(lo, hi)


def query_range(kv_first, kv_last, limits):
    """Queries that see some key of ``kv_first..kv_last``: the transpose of :func:`key_range`."""
    key_first = maximum(kv_first, limits.first_key)
    key_last = minimum(kv_last, limits.end_key - 1)
    first = maximum(0, key_first - limits.shift - limits.window_right)
    first = where(key_first < limits.prefix_len, 0, first)
    end = minimum(limits.q_len, key_last + 1 - limits.shift + limits.window_left)
    return first, where(key_first <= key_last, maximum(first, end), first)


def full_query_range(kv_first, kv_last, limits):
    """Queries that see every key of ``kv_first..kv_last``: :func:`full_key_range` transposed."""
    first = kv_last - limits.shift - limits.window_right
    first = where(kv_last < limits.prefix_len, 0, maximum(0, first))
    end = minimum(limits.q_len, kv_first + 1 - limits.shift + limits.window_left)
    seen = (kv_first >= limits.first_key) & (kv_last < limits.end_key)
    return first, where(seen, maximum(first, end), first)


def split_tiles(start, end, full_start, full_end, block):
    """Cut ``[start, end)`` at multiples of ``block``: masked head, unmasked middle, masked tail.

    Returns ``(start, full_start, full_end, end)``, ascending, each a multiple of ``block``.
    """
    first = start // block * block
    end = where(start < end, (end + block - 1) // block * block, first)
    start = first
    full_start = minimum(maximum(start, (full_start + block - 1) // block * block), end)
    full_end = minimum(maximum(full_start, full_end // block * block), end)
    return start, full_start, full_end, end


def tanh(x):
    """Hyperbolic tangent to a few units in the last place, float32 and float64, near 0 too.

    Below 0.625 a rational function of x squared (Cephes, Moshier 1984-2000), above it the
    exponential, which neither cancels nor overflows there; one division serves both.
    """
    near = minimum(maximum(x, -0.625), 0.625)
    square = near * near
    p = (square * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * square
    p = p - 1.61468768441708447952e3
    q = ((square + 1.12811678491631932402e2) * square + 2.23548839060100448583e3) * square
    q = q + 4.84406305325125486048e3
    decay = exp(-2 * maximum(x, -x))
    small = near == x
    rest = where(x < 0, decay - 1, 1 - decay)
    part = where(small, near * square * p, rest) / where(small, q, 1 + decay)
    return where(small, near + part, part)


def soft_cap(score, cap):
    """A score squeezed smoothly into ``(-cap, cap)`` (Gemma 2); small scores keep their value."""
    return cap * tanh(score / cap)


def soft_cap_slope(capped, cap):
    """Derivative of :func:`soft_cap`, from its result."""
    ratio = capped / cap
    return (1 - ratio) * (1 + ratio)


def alibi(q_idx, kv_idx, slope, limits):
    """What a head's slope takes off a score: linear in the diagonal's distance (Press 2022)."""
    distance = q_idx + limits.shift - kv_idx
    return slope * maximum(distance, -distance)


def keep_scale(threshold):
    """Factor of kept weights: one over the exact keep probability; ``threshold`` is a float."""
    kept = 65536 - threshold
    return where(kept > 0, 65536.0 / maximum(kept, 1.0), 0.0)


def mix(x):
    """Bijective 32-bit mixing on int32 (lowbias32, Wellons 2018); masks make shifts logical."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261
    return x ^ ((x >> 16) & 0xFFFF)


def dropout_head_key(seed_lo, seed_hi, sequence, head):
    """A 64-bit key, as two int32, of one head of one sequence under one seed."""
    first = mix(mix(mix(seed_lo) ^ seed_hi) + sequence * -1640531527)
    second = mix(mix(mix(seed_hi + 0x3C6EF372) ^ seed_lo) + head * -2048144789)
    return mix(first + head * 0x165667B1), mix(second + sequence * 0x27D4EB2F)


def dropout_row_key(head_key, q_idx):
    """A 64-bit key, as two int32, of every query row."""
    return mix(head_key[0] + q_idx * -1640531527), mix(head_key[1] ^ (q_idx * -1028477379))


def dropout_pair(kv_idx):
    """The pair that keys ``kv_idx`` and ``kv_idx ^ 8`` share: one hash serves both."""
    return (kv_idx >> 4) * 8 + (kv_idx & 7)


def dropout_pair_key(pair):
    """A 32-bit key of every pair of key columns."""
    return mix(pair * -1640531527 + 0x52DCE729)


def dropout_word(row_first, row_second, pair_key):
    """32 random bits for one query row and one pair of key columns."""
    x = row_first + pair_key
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = ((x ^ ((x >> 15) & 0x1FFFF)) + row_second) * -2073254261
    return x ^ ((x >> 16) & 0xFFFF)


def dropout_bits(word, kv_idx):
    """The 16 bits of ``word`` that decide over key ``kv_idx``: dropped below the threshold."""
    return (word >> (((kv_idx >> 3) & 1) * 16)) & 0xFFFF
