"""Mask.show: its cells against the oracle, its tiles against what a backend computed."""

import doctest
import re
import xml.etree.ElementTree as ET
from typing import Any, NamedTuple

import pytest
import torch
from cases import by_head, cu_seqlens, striped
from oracle import sees

from flashmod import Mask, TileConfig, flash_attention
from flashmod.picture import MaskPicture
from flashmod.stats import FULL, PARTIAL, SKIPPED


class Shown(NamedTuple):
    """A mask, lengths, and what the oracle is told of every sequence."""

    mask: Mask
    q: tuple[int, ...]
    kv: tuple[int, ...]
    rules: tuple[dict[str, Any], ...]


SHOWN = {
    "full": Shown(Mask(), (17,), (40,), ({},)),
    "causal": Shown(Mask(causal=True), (40,), (40,), ({"right": 0},)),
    "short_q": Shown(Mask(causal=True), (5, 21), (37, 37), ({"right": 0},) * 2),
    "long_q": Shown(Mask(causal=True), (33,), (9,), ({"right": 0},)),
    "top_left": Shown(
        Mask(causal=True, align="top_left"), (20,), (45,), ({"right": 0, "bottom_right": False},)
    ),
    "window": Shown(Mask(window=(20, 3)), (64,), (64,), ({"left": 20, "right": 3},)),
    "prefix": Shown(
        Mask(causal=True, window=(9, None), prefix_len=18),
        (40,),
        (40,),
        ({"left": 9, "right": 0, "prefix": 18},),
    ),
    "mixed": Shown(
        Mask(causal=[True, False, False], window=([None, 4, None], None), prefix_len=[3, 0, 0]),
        (39, 18, 0),
        (39, 30, 7),
        ({"right": 0, "prefix": 3}, {"left": 4}, {}),
    ),
}


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_cells_are_those_of_the_oracle(shown: Shown) -> None:
    panels = shown.mask.show(shown.q, shown.kv, tiles=TileConfig(8, 4)).panels
    assert len(panels) == len(shown.rules)
    for panel, q_len, kv_len, rule in zip(panels, shown.q, shown.kv, shown.rules, strict=True):
        lengths = q_len, kv_len
        expected = [[sees(i, j, lengths, **rule) for j in range(kv_len)] for i in range(q_len)]
        assert panel.cells is not None
        assert panel.cells.tolist() == expected
        assert panel.counts.visible == sum(map(sum, expected))
        assert panel.counts.pairs == q_len * kv_len


def same(batch, head, q_idx, kv_idx, q_label, kv_label):
    return q_label == kv_label


LABELS = torch.arange(70) // 9
FUNCTIONS = {
    "striped": Mask(causal=True, fn=striped, fn_args=(3, 2)),
    "by_head": Mask(fn=by_head),
    "labels": Mask(window=(20, 0), fn=same, labels=(LABELS, LABELS)),
}


@pytest.mark.parametrize(
    "name", [*(name for name, shown in SHOWN.items() if max(shown.q) > 0), *FUNCTIONS]
)
def test_tiles_are_those_a_backend_computes(name: str) -> None:
    q_lengths, kv_lengths = (40, 7, 23), (40, 7, 23)
    mask = FUNCTIONS.get(name)
    if mask is None:
        mask, q_lengths, kv_lengths, _ = SHOWN[name]
    q, k = (torch.zeros(sum(x), 2, 4) for x in (q_lengths, kv_lengths))
    ends = {"cu_seqlens_q": cu_seqlens(q_lengths), "cu_seqlens_k": cu_seqlens(kv_lengths)}
    for tiles in (TileConfig(16, 16), TileConfig(7, 3)):
        _, stats = flash_attention(
            q, k, k, mask=mask, **ends, tiles=tiles, backend="tiled", return_stats=True
        )
        picture = mask.show(q_lengths, kv_lengths, tiles=tiles, head=1)
        for panel, sequence in zip(picture.panels, stats.sequences, strict=True):
            assert panel.kinds.tolist() == sequence.kinds[1].tolist()
        assert 2 * picture.total.computed == stats.tiles_processed
        assert 2 * picture.total.partial == stats.tiles_partial
        assert 2 * picture.total.skipped == stats.tiles_skipped


def test_functions_are_asked_about_the_head_and_the_id() -> None:
    picture = Mask(fn=striped, fn_args=(3, 1)).show([5, 5], sequence_ids=[4, 7])
    for panel, ident in zip(picture.panels, (4, 7), strict=True):
        assert panel.cells is not None
        expected = [[(j + ident) % 3 != 0 or i == j for j in range(5)] for i in range(5)]
        assert panel.cells.tolist() == expected
    (panel,) = Mask(fn=by_head).show(12, head=2).panels
    assert panel.cells is not None
    near = [[(i + j) % 4 == 0 and abs(i - j) < 9 for j in range(12)] for i in range(12)]
    assert panel.cells.tolist() == near
    assert "head 2" in panel.caption[0]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_labels_lie_as_in_the_call(layout: str) -> None:
    labels = torch.tensor([1, 1, 2, 5, 6, 6, 6])
    if layout == "padded":
        labels = torch.tensor([[1, 1, 2, 0, 0], [5, 6, 6, 6, 0]])
    picture = Mask(fn=same, labels=(labels, labels)).show([3, 4])
    assert [panel.counts.visible for panel in picture.panels] == [5, 10]


def test_counts_by_hand() -> None:
    total = Mask(causal=True).show(40).total
    assert total == (3, 3, 3, 820, 1600)  # tiles of 16: below, on and above the diagonal
    assert total.computed == 6 and total.tiles == 9
    total = Mask(window=(0, 0)).show([32, 16]).total
    assert total == (0, 3, 2, 48, 32 * 32 + 16 * 16)
    assert Mask().show(32).total == (4, 0, 0, 1024, 1024)
    said = str(Mask(causal=True).show(40))
    assert "tiles of 16x16: 6 of 9 (66.7%) computed" in said
    assert "3 full, 3 partial, 3 skipped" in said
    assert "pairs: 820 of 1600 (51.2%) visible" in said


def test_text_by_hand() -> None:
    lines = str(Mask(causal=True).show(4, tiles=TileConfig(2, 2))).splitlines()
    assert lines[-8:] == [
        "   0    2",
        "  ┌────┬────┐",
        "0 │▒▒··│    │",
        "  │▒▒▒▒│    │",
        "  ├────┼────┤",
        "2 │████│▒▒··│",
        "  │████│▒▒▒▒│",
        "  └────┴────┘",
    ]


def test_long_sequences_are_drawn_by_tiles() -> None:
    (panel,) = Mask(causal=True).show(70, tiles=TileConfig(10, 10)).panels
    assert panel.cells is None and panel.caption[-1] == "drawn by tiles"
    assert torch.equal(panel.grid().marks, panel.kinds)
    assert panel.counts.visible == 70 * 71 // 2
    (panel,) = Mask(causal=True).show(129 * 4 + 1, tiles=TileConfig(4, 4)).panels
    marks = panel.grid().marks  # 130 tiles a side: 44 squares of 3 x 3
    assert panel.kinds.shape == (130, 130) and marks.shape == (44, 44)
    assert "3x3 tiles" in panel.caption[-1]
    row = torch.arange(44)[:, None]
    by_hand = torch.where(row > row.T, FULL, torch.where(row == row.T, PARTIAL, SKIPPED))
    assert marks.tolist() == by_hand.tolist()
    drawn = str(Mask(causal=True).show(5000))
    assert max(map(len, drawn.splitlines())) < 80


def test_pairs_under_a_function_are_counted_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmod.picture.panels._CELLS_AT_ONCE", 150)
    picture = Mask(causal=True, fn=same, labels=(LABELS, LABELS)).show(70)
    assert picture.total.visible == 7 * 45 + 28  # documents of 9, and one of 7


NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


@pytest.mark.parametrize(
    "picture",
    [*(shown.mask.show(shown.q, shown.kv) for shown in SHOWN.values())]
    + [Mask(causal=True).show(n) for n in (0, [], [3, 0, 200], 5000)]
    + [Mask().show([0, 200], [200, 0])],
    ids=[*SHOWN, "empty", "none", "ragged", "long", "one_side"],
)
def test_figures_are_xml_that_says_what_the_text_says(picture: MaskPicture) -> None:
    root = ET.fromstring(picture._repr_svg_())
    words = [text.text for text in root.iterfind(".//svg:text", NAMESPACE)]
    said = str(picture)
    for panel in picture.panels:
        assert set(panel.caption) <= set(words)
        assert all(line in said for line in panel.caption)
    assert "keys →" in words or picture.total.pairs == 0
    assert ("total: 3 sequences" in words) == (len(picture.panels) == 3)


def test_the_figure_paints_every_cell_once() -> None:
    (panel,) = Mask(causal=True, window=(20, None)).show(40).panels
    root = ET.fromstring(MaskPicture((panel,)).svg())
    area = dict.fromkeys(("full", "part", "hidden"), 0.0)
    for path in root.iterfind(".//svg:path", NAMESPACE):
        boxes = re.findall(r"h([\d.]+)v([\d.]+)h-", path.get("d", ""))
        if path.get("class") in area:
            area[path.get("class", "")] += sum(float(w) * float(h) for w, h in boxes)
    cell = (256 / 40) ** 2
    counts = panel.counts
    processed = {kind: int((panel.kinds == kind).sum()) for kind in (FULL, PARTIAL, SKIPPED)}
    assert [processed[FULL], processed[PARTIAL], processed[SKIPPED]] == list(counts[:3])
    assert area["full"] + area["part"] == pytest.approx(counts.visible * cell, rel=1e-4)
    assert panel.cells is not None
    tiles = panel.kinds.repeat_interleave(16, 0).repeat_interleave(16, 1)[:40, :40]
    hidden = int(((tiles == PARTIAL) & ~panel.cells).sum())
    assert area["hidden"] == pytest.approx(hidden * cell, rel=1e-4)


def test_many_sequences_are_counted_and_some_drawn() -> None:
    said = str(Mask(causal=True).show([4] * 11))
    assert said.count("queries x") == 8
    assert "3 more sequences are counted, not drawn" in said
    assert "pairs: 110 of 176 (62.5%) visible" in said


def test_lengths_in_every_form() -> None:
    mask = Mask(causal=True)
    expected = str(mask.show([3, 5], [4, 6]))
    assert str(mask.show(torch.tensor([3, 5]), (4, 6))) == expected
    assert repr(mask.show((3, 5), torch.tensor([4, 6], dtype=torch.int32))) == expected
    assert str(mask.show(torch.tensor(7))) == str(mask.show(7)) == str(mask.show([7], 7))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([3, -1],), ValueError, "lengths must be 0 or more, got -1"),
        ((2.5,), TypeError, "lengths must be an int or one per sequence, got 2.5"),
        ((torch.tensor([3.0]),), TypeError, "lengths must hold one integer.*float32"),
        (([3], "ab"), TypeError, "lengths_k must be an int or one per sequence, got 'ab'"),
        (([3, 4], [5]), ValueError, "lengths has 2 sequences, lengths_k has 1"),
        (([3, 4, 5],), ValueError, r"mask causal has shape \(2,\), but the call has 3"),
    ],
)
def test_bad_lengths_say_what_is_wrong(
    arguments: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Mask(causal=[True, False]).show(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tiles": 16}, TypeError, "tiles must be a flashmod.TileConfig, got 16"),
        ({"tiles": TileConfig(0, 4)}, ValueError, "1 or more, got TileConfig"),
        ({"head": -1}, ValueError, "head must be an integer of 0 or more, got -1"),
        ({"head": 0.5}, ValueError, "head must be an integer of 0 or more, got 0.5"),
        ({"sequence_ids": [1, 2]}, ValueError, r"sequence_ids must be \(1,\)"),
    ],
)
def test_bad_options_say_what_is_wrong(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Mask().show(9, **options)


def test_labels_that_do_not_fit_the_lengths() -> None:
    packed, padded = torch.zeros(8, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"labels of queries have shape \(8,\).*\[9\]"):
        Mask(fn=same, labels=(packed, packed)).show(9)
    with pytest.raises(ValueError, match=r"labels of keys have shape \(1, 8\).*\[9\].*\(1, 9\)"):
        Mask(fn=same, labels=(padded, padded)).show(3, 9)
    with pytest.raises(ValueError, match=r"\(T,\) for queries and keys, or \(B, S\) for both"):
        Mask(fn=same, labels=(packed, padded)).show(8)
    with pytest.raises(ValueError, match="mask limits must be 0 or more, got -1"):
        Mask(window=(torch.tensor([-1]), None)).show(8)


def test_example_of_the_docstring() -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(Mask.show, globs={"Mask": Mask})
    assert doctest.DocTestRunner().run(example) == (0, 1)
