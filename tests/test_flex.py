"""The README's table from FlexAttention to here, each row run on both sides.

Flex itself is the truth of a forward pass. It has no backward pass on a CPU, so gradients are
those of dense float64 attention under the very expressions that Flex was given.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import cu_seqlens
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from flashmod import Mask, flash_attention

README = (Path(__file__).parent.parent / "README.md").read_text()
BATCH, HEADS, S, DIM = 3, 2, 37, 8


def same(batch, head, q_idx, kv_idx, q_label, kv_label):
    return q_label == kv_label


def past_or_image(batch, head, q_idx, kv_idx, q_label, kv_label):
    return (kv_idx <= q_idx) | ((q_label == kv_label) & (q_label > 0))


def dilated(batch, head, q_idx, kv_idx, step):
    return (q_idx - kv_idx) % step == 0


def near_or_first(batch, head, q_idx, kv_idx, window, first):
    return (q_idx - kv_idx < window) | (kv_idx < first)


def odd_heads_near(batch, head, q_idx, kv_idx, window):
    return (head % 2 == 0) | ((q_idx - kv_idx < window) & (kv_idx - q_idx < window))


class Row(NamedTuple):
    """A row of the table: an expression for Flex, and arguments for ``flash_attention``."""

    name: str
    flex: str
    here: str

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys: apart where the row says so, and not where it means the same."""
        if "offset" in self.name or "lengths" in self.name:
            return 21, S
        return (11, S) if "cache" in self.name else (S, S)


def table() -> list[Row]:
    section = README.split("## From FlexAttention\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    rows = [re.split(r" (?<!\\)\| ", line.removeprefix("| ").removesuffix(" |")) for line in lines]
    return [Row(*(cell.replace("\\|", "|").strip("`") for cell in row)) for row in rows]


class Call(NamedTuple):
    """A row made ready: inputs (B, S, H, D), what Flex runs, what flash_attention is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    names: dict[str, Any]
    row: Row

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Every input that has a gradient."""
        learned = {n: x for n, x in self.names.items() if isinstance(x, Tensor) and x.requires_grad}
        return {"q": self.q, "k": self.k, "v": self.v, **learned}

    def expression(self, *arguments: str) -> Callable[..., Any]:
        return eval(f"lambda {', '.join(arguments)}: {self.row.flex}", self.names)


def build(row: Row, dtype: torch.dtype) -> Call:
    q_len, kv_len = row.lengths
    batch = 1 if "ends" in row.here else BATCH
    generator = torch.Generator().manual_seed(len(row.flex))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, requires_grad=True)

    q, k, v = (randn(batch, n, HEADS, DIM) for n in (q_len, kv_len, kv_len))
    at = torch.arange(S)
    document = torch.tensor([0] * 9 + [1] * 1 + [2] * 27)
    learned = {"per_key": randn(batch, S), "table": randn(HEADS, 2 * S - 1), "sink": randn(HEADS)}
    allowed = torch.rand(HEADS, S, S, generator=generator) < 0.4
    functions = same, past_or_image, dilated, near_or_first, odd_heads_near
    names = {
        **{fn.__name__: fn for fn in functions},
        **{name: x for name, x in learned.items() if name in row.flex},
        **{"Mask": Mask, "tanh": torch.tanh, "sigmoid": torch.sigmoid},
        **{"q_len": q_len, "kv_len": kv_len, "S": S, "rows": at[:, None], "columns": at},
        "allowed": allowed,
        "document": document,
        "prefix": torch.tensor([5, 0, 30]),
        "causal": torch.tensor([True, False, True]),
        "lengths": torch.tensor([S, 4, 18]),
        "ends": cu_seqlens([9, 1, 27]),
        "group": torch.stack([at % 3, at // 5, at * at % 7]),
        "image": torch.stack([at // 6 % 3, 0 * at, at // 20]),
        "slopes": torch.tensor([0.5, 0.0625], dtype=dtype),
    }
    return Call(q, k, v, names, row)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Flex warns that it has not been compiled, which is the point of an oracle."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def by_flex(call: Call) -> Tensor:
    """out (B, S, H, D)."""
    q, k, v = (x.detach().transpose(1, 2) for x in (call.q, call.k, call.v))
    positions, flex = ("b", "h", "q_idx", "kv_idx"), call.row.flex
    options: dict[str, Any] = {}
    if "score" in flex:
        options["score_mod"] = call.expression("score", *positions)
    elif "lse" not in flex:
        sizes = q.shape[0], HEADS, q.shape[2], k.shape[2]
        options["block_mask"] = create_block_mask(call.expression(*positions), *sizes, device="cpu")
    with torch.no_grad(), uncompiled():
        if "lse" not in flex:
            return flex_attention(q, k, v, **options).transpose(1, 2)
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
        return call.expression("out", "lse")(out, aux.lse).transpose(1, 2)


def by_hand(call: Call) -> Tensor:
    """Dense attention with the expression on all positions at once; out (B, S, H, D)."""
    batch, q_len, _, _ = call.q.shape
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1)
    positions = b, h, torch.arange(q_len)[:, None], torch.arange(call.k.shape[1])
    names, flex = ("b", "h", "q_idx", "kv_idx"), call.row.flex
    scores = torch.einsum("bqhd,bkhd->bhqk", call.q, call.k) / DIM**0.5
    if "score" in flex:
        scores = call.expression("score", *names)(scores, *positions)
    elif "lse" not in flex:
        seen = call.expression(*names)(*positions)
        scores = scores.masked_fill(~seen, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    out = torch.einsum("bhqk,bkhd->bhqd", weights, call.v)
    if "lse" in flex:
        out = call.expression("out", "lse")(out, scores.logsumexp(-1))
    return out.transpose(1, 2)


def here(call: Call, **options: Any) -> Tensor:
    """out (B, S, H, D); packed documents are a batch of one."""
    q, k, v = call.q, call.k, call.v
    arguments = eval(f"dict({call.row.here})", call.names)
    if "cu_seqlens_q" in arguments:
        return flash_attention(q[0], k[0], v[0], **arguments, **options)[None]
    return flash_attention(q, k, v, **arguments, **options)


ROWS = pytest.mark.parametrize("row", table(), ids=[row.name for row in table()])


@ROWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_is_that_of_flex(row: Row, dtype: torch.dtype) -> None:
    call = build(row, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(here(call), by_flex(call), rtol=tolerance, atol=tolerance)


@ROWS
def test_gradients_are_those_of_the_expression(row: Row) -> None:
    call = build(row, torch.float64)
    grad = torch.randn(call.q.shape, dtype=torch.float64)
    expected, got = (
        torch.autograd.grad(attention(call), list(call.leaves.values()), grad)
        for attention in (by_hand, here)
    )
    for name, theirs, ours in zip(call.leaves, expected, got, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.testing.assert_close(by_hand(call), by_flex(call), rtol=1e-11, atol=1e-11)


@ROWS
def test_the_row_means_something(row: Row) -> None:
    """Another result than attention without a mask: no row passes because both sides ignore it."""
    call = build(row, torch.float64)
    plain = flash_attention(call.q, call.k, call.v)
    assert (here(call) - plain).abs().max() > 1e-3


def test_a_factor_of_the_score_goes_into_q() -> None:
    call = build(Row("factor", "score * factor[h]", ""), torch.float64)
    call.names["factor"] = torch.tensor([0.5, 3.0], dtype=torch.float64)
    out = flash_attention(call.q * call.names["factor"][:, None], call.k, call.v)
    torch.testing.assert_close(out, by_flex(call), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(out, by_hand(call), rtol=1e-11, atol=1e-11)


def test_the_table_has_its_rows() -> None:
    rows = table()
    assert len(rows) == 22 and len({row.name for row in rows}) == 22
