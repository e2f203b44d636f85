"""What packing would save, counted from lengths."""

import pytest
import torch

from flashmod.comparison import padding_report

LENGTHS = [[5, 2, 1], [3, 3, 3]]


def batches():
    """The same two batches, as everything that may hold them."""
    width = [max(one) for one in LENGTHS]
    valid = [
        torch.arange(w) < torch.tensor(n)[:, None] for n, w in zip(LENGTHS, width, strict=True)
    ]
    x = [torch.zeros(3, w, 4) for w in width]
    return {
        "lists": LENGTHS,
        "tensors": [torch.tensor(one) for one in LENGTHS],
        "sequences": [[torch.zeros(n) for n in one] for one in LENGTHS],
        "token lists": [[list(range(n)) for n in one] for one in LENGTHS],
        "attention_mask": [{"attention_mask": v.long()} for v in valid],
        "padding_mask": [{"x": y, "key_padding_mask": ~v} for y, v in zip(x, valid, strict=True)],
        "lengths": [{"x": y, "lengths": torch.tensor(n)} for y, n in zip(x, LENGTHS, strict=True)],
    }


@pytest.mark.parametrize("form", batches())
def test_every_form_gives_the_same_report(form):
    found = padding_report(batches()[form])
    assert (found.batches, found.sequences) == (2, 6)
    assert (found.shortest, found.median, found.longest) == (1, 3, 5)
    assert found.total == (17, 24, 25 + 4 + 1 + 27, 3 * 25 + 27)
    assert found.largest == (9, 15, 30, 75)
    assert found.share == pytest.approx(7 / 24)
    assert found.linear_time == pytest.approx(17 / 24)
    assert found.quadratic_time == pytest.approx(57 / 102)
    assert found.linear_memory == pytest.approx(9 / 15)
    assert found.quadratic_memory == pytest.approx(30 / 75)


def test_sequences_are_put_into_batches():
    flat = [n for one in LENGTHS for n in one]
    assert padding_report(flat, batch_size=3).total == padding_report(LENGTHS).total
    text = ["x" * n for n in flat]
    assert padding_report(text, batch_size=3).total == padding_report(LENGTHS).total
    assert padding_report(flat, batch_size=4, max_batches=1).sequences == 4


def test_a_dataloader():
    data = [(torch.arange(4), torch.tensor([True, True, n > 1, n > 2])) for n in range(4)]
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    found = padding_report(loader)
    assert found.total.tokens == 2 + 2 + 3 + 4 and "guess" in found.how
    tokens = torch.utils.data.DataLoader([torch.tensor([7, 7, 0])] * 3, batch_size=3)
    found = padding_report(tokens, lengths=lambda batch: (batch != 0).sum(1).tolist())
    assert found.total.tokens == 6


def test_parts_are_weighed_by_width():
    """Against multiplications counted one by one."""
    narrow, wide = (padding_report(LENGTHS, embed_dim=e).time for e in (1, 10_000))
    low, high = sorted((narrow, wide))
    base = padding_report(LENGTHS)
    assert base.quadratic_time < low <= high < base.linear_time + 1e-9

    def cost(tokens, pairs, e=8):
        projections, mlp, attention = 4 * e * e * tokens, 8 * e * e * tokens, 2 * e * pairs
        return projections + mlp + attention

    assert padding_report(LENGTHS, embed_dim=8).time == pytest.approx(cost(17, 57) / cost(24, 102))
    text = str(padding_report(LENGTHS, embed_dim=8))
    assert "29% of 24 positions" in text and "width 8" in text and "0.71x" in text


def test_what_cannot_be_read_says_what_to_give():
    with pytest.raises(TypeError, match="lengths="):
        padding_report([torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="no batch"):
        padding_report([])
    with pytest.raises(ValueError, match="batch_size"):
        padding_report([1, 2], batch_size=0)
    with pytest.raises(ValueError, match="give lengths"):
        padding_report([1], batch_size=1, lengths=len)
