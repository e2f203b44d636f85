"""Corpora, packing, batches: what a training run sees, and that it sees all of it once."""

import hashlib
import subprocess
import sys
from collections import Counter
from math import log2

import pytest
import torch

from flashmod.training.data import (
    Corpus,
    DataConfig,
    cut,
    load_corpus,
    split_documents,
    unigram_entropy,
)
from flashmod.training.packing import BOS, Packed, PackedLoader, pack
from flashmod.training.sampler import PackedBatchSampler
from flashmod.training.sources import stdlib_documents, synthetic_documents

RAGGED = [len(d) for d in synthetic_documents(60, 50, seed=1)]


def documents_of(lengths: list[int]) -> list[bytes]:
    return [bytes([i % 256]) * n for i, n in enumerate(lengths)]


def batches(sampler: PackedBatchSampler, epoch: int = 0) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


# Corpora


def test_synthetic_is_the_same_everywhere() -> None:
    ragged = load_corpus(DataConfig("synthetic", seq_len=64, documents=100, seed=3))
    fixed = load_corpus(DataConfig("synthetic", seq_len=32, documents=8, lengths="fixed"))
    assert ragged.sha256[:16] == "13d72cd2c11fc737"
    assert fixed.sha256[:16] == "a8ed03f8cf7e188b"
    assert {len(d) for d in fixed.train + fixed.val} == {32}
    assert ragged.sha256 != load_corpus(DataConfig("synthetic", 64, documents=100, seed=4)).sha256


def test_synthetic_lengths_are_ragged_and_log_normal() -> None:
    lengths = torch.tensor([len(d) for d in synthetic_documents(4000, 1200)]).double()
    uncut = lengths.log()[lengths < 1200]
    assert lengths.min() >= 1 and lengths.max() <= 1200
    assert lengths.quantile(0.5).item() == pytest.approx(400, rel=0.05)
    # 2 ** (binomial(47) / 4): standard deviation sqrt(47 / 4) / 4 octaves.
    low = uncut.quantile(0.16).item()
    assert uncut.quantile(0.5).item() - low == pytest.approx((47 / 4) ** 0.5 / 4 * 0.6931, rel=0.15)


def test_synthetic_structure_takes_two_bytes_of_context() -> None:
    documents = synthetic_documents(100, 2000, fixed=True)

    def entropy_after(order: int) -> float:
        seen = Counter(d[i - order : i + 1] for d in documents for i in range(order, len(d)))
        context = Counter(d[i - order : i] for d in documents for i in range(order, len(d)))
        total = sum(seen.values())
        return sum(n / total * log2(context[key[:-1]] / n) for key, n in seen.items())

    assert entropy_after(0) == pytest.approx(unigram_entropy(documents), abs=1e-3)
    assert entropy_after(0) > entropy_after(1) + 1 > entropy_after(2) + 2
    assert entropy_after(2) < 1.8


def test_stdlib_functions_are_whole_and_do_not_overlap() -> None:
    functions = stdlib_documents("function")
    assert len(functions) > 5000
    assert all(b"def " in f or b"def\\" in f for f in functions)
    text = b"\n".join(functions)
    assert b"def namedtuple(typename, field_names" in text  # collections/__init__.py
    assert text.count(b"def __getnewargs__(self):\n        'Return self as a plain tuple.") == 1
    assert b"class IdbAdapter" not in text  # idlelib


def test_stdlib_files_leave_tests_out(tmp_path, monkeypatch) -> None:
    for name in ("a.py", "test/b.py", "json/tests/c.py", "site-packages/d.py", "json/e.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f():\n    return {name!r}\n\n\nx = 1\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    functions = stdlib_documents("function")
    assert functions == [b"def f():\n    return 'a.py'\n", b"def f():\n    return 'json/e.py'\n"]
    assert [f.split(b"\n")[0] for f in stdlib_documents("file")] == [
        b"def f():",
        b"def f(:",
        b"def f():",
    ]


def test_files_are_documents_in_path_order(tmp_path) -> None:
    for name, text in (("b.txt", b"second"), ("a.txt", b"first"), ("c.txt", b""), ("d.md", b"no")):
        (tmp_path / name).write_bytes(text)
    corpus = load_corpus(DataConfig("files", glob=str(tmp_path / "*.txt"), seq_len=4))
    assert (corpus.documents, corpus.bytes) == (2, 11)
    assert sorted(corpus.train + corpus.val) == [b"firs", b"nd", b"seco", b"t"]
    digest = hashlib.sha256()
    for document in (b"first", b"second"):
        digest.update(len(document).to_bytes(8, "big") + document)
    assert corpus.sha256 == digest.hexdigest()
    with pytest.raises(ValueError, match=r"\*\.none' matches no file"):
        load_corpus(DataConfig("files", glob=str(tmp_path / "*.none")))


def test_split_is_by_document() -> None:
    documents = synthetic_documents(500, 40)
    train, val = split_documents(documents, 0.1)
    assert sorted(train + val) == sorted(documents)
    assert not set(train) & set(val)
    assert 25 <= len(val) <= 80
    again_train, again_val = split_documents(documents[::-1] + documents[:50], 0.1)
    assert set(again_train) == set(train) and set(again_val) == set(val)
    corpus = load_corpus(DataConfig("synthetic", seq_len=16, documents=300, val_fraction=0.3))
    assert corpus.train_documents + corpus.val_documents == corpus.documents == 300


def test_split_never_leaves_a_side_empty() -> None:
    assert [len(side) for side in split_documents([b"a", b"b", b"c"], 1e-6)] == [2, 1]
    assert [len(side) for side in split_documents([b"a", b"b", b"c"], 1 - 1e-6)] == [1, 2]
    with pytest.raises(ValueError, match="3 documents of which 1 differ"):
        split_documents([b"a"] * 3, 0.5)


def test_cut_keeps_every_byte() -> None:
    assert cut([b"abcdef", b"", b"gh", b"ijk"], 3) == [b"abc", b"def", b"gh", b"ijk"]


def test_unigram_entropy() -> None:
    assert unigram_entropy([b"aabb", b"ccdd"]) == pytest.approx(2.0)
    assert unigram_entropy([b"aaa"]) == 0.0
    assert unigram_entropy([b"aaab"]) == pytest.approx(0.8112781)


def test_record_holds_the_contract_keys() -> None:
    corpus = load_corpus(DataConfig("synthetic", seq_len=16, documents=10))
    assert isinstance(corpus, Corpus)
    assert corpus.unigram_entropy == unigram_entropy(corpus.val) != unigram_entropy(corpus.train)
    assert list(corpus.record()) == [
        "name", "sha256", "documents", "bytes", "train_documents", "val_documents",
        "unigram_entropy",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "stdlb"}, "data.name is 'stdlb'.*stdlib, synthetic, files"),
        ({"unit": "class"}, "data.unit is 'class'"),
        ({"lengths": "normal"}, "data.lengths is 'normal'"),
        ({"seq_len": 0}, "data.seq_len is 0"),
        ({"val_fraction": 1.0}, "data.val_fraction is 1.0"),
        ({"documents": 1}, "data.documents is 1"),
        ({"name": "files"}, "data.glob"),
    ],
)
def test_config_errors_name_key_and_value(values, message) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**values)


# Packing


def test_pack_predicts_every_byte_once() -> None:
    packed = pack([b"abc", b"", b"z", b"\x00\xff", b""])
    assert packed.tokens.tolist() == [BOS, 97, 98, BOS, BOS, 0]
    assert packed.targets.tolist() == [97, 98, 99, 122, 0, 255]
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 4, 6, 6]
    assert (packed.tokens.dtype, packed.targets.dtype) == (torch.int64, torch.int64)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_len == 3


def test_pack_of_nothing() -> None:
    packed = pack([])
    assert packed.tokens.shape == packed.targets.shape == (0,)
    assert packed.cu_seqlens.tolist() == [0]


def test_packed_moves_as_a_whole(monkeypatch) -> None:
    packed = pack([b"abc"])
    moved = packed.to("meta", non_blocking=True)
    assert {t.device.type for t in (moved.tokens, moved.targets, moved.cu_seqlens)} == {"meta"}
    assert moved.max_len == 3 and moved.cu_seqlens.dtype == torch.int32
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    assert isinstance(packed.pin_memory(), Packed)
    assert len(pinned) == 3


# Batches


@pytest.mark.parametrize("budget", range(max(RAGGED), max(RAGGED) + 40))
def test_budget_is_kept_and_nothing_is_lost(budget) -> None:
    sampler = PackedBatchSampler(RAGGED, tokens_per_batch=budget)
    count = len(sampler)  # Lightning asks once, before the first epoch
    for epoch in range(4):
        sizes = [sum(RAGGED[i] for i in batch) for batch in batches(sampler, epoch)]
        assert max(sizes) <= budget
        assert len(sizes) == count
        assert sorted(i for batch in sampler for i in batch) == list(range(60))
    assert sum(sizes) / len(sizes) > 0.65 * budget


def test_order_changes_with_the_epoch_and_repeats() -> None:
    sampler = PackedBatchSampler(RAGGED, tokens_per_batch=100, seed=5)
    first, second = batches(sampler, 0), batches(sampler, 1)
    assert first != second
    assert {frozenset(b) for b in first} != {frozenset(b) for b in second}
    assert batches(sampler, 0) == first
    assert batches(PackedBatchSampler(RAGGED, tokens_per_batch=100, seed=5), 1) == second
    assert batches(PackedBatchSampler(RAGGED, tokens_per_batch=100, seed=6), 0) != first
    plain = PackedBatchSampler(RAGGED, tokens_per_batch=100, shuffle=False)
    assert batches(plain, 0) == batches(plain, 1)
    assert [i for batch in plain for i in batch] == list(range(60))


def test_sequences_per_batch() -> None:
    sampler = PackedBatchSampler(RAGGED, sequences_per_batch=8)
    assert sorted(map(len, batches(sampler))) == [4] + [8] * 7
    full = PackedBatchSampler(RAGGED, sequences_per_batch=8, drop_last=True)
    assert {len(b) for e in range(3) for b in batches(full, e)} == {8}
    assert len(full) == 7
    few = PackedBatchSampler(RAGGED[:3], sequences_per_batch=8, drop_last=True)
    assert [len(b) for b in few] == [3]


@pytest.mark.parametrize("sizes", [{"tokens_per_batch": 100}, {"sequences_per_batch": 7}])
@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_the_documents(sizes, world_size, shuffle) -> None:
    ranks = [
        PackedBatchSampler(RAGGED, shuffle=shuffle, rank=r, world_size=world_size, **sizes)
        for r in range(world_size)
    ]
    for epoch in range(3):
        per_rank = [batches(sampler, epoch) for sampler in ranks]
        assert {len(b) for b in per_rank} == {len(ranks[0])}
        seen = [i for rank in per_rank for batch in rank for i in batch]
        assert sorted(seen) == list(range(60))


def test_too_few_documents_for_the_ranks() -> None:
    with pytest.raises(ValueError, match="2 documents cannot be shared evenly by 3 ranks"):
        len(PackedBatchSampler([5, 5], tokens_per_batch=10, rank=0, world_size=3))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "give exactly one"),
        ({"tokens_per_batch": 9, "sequences_per_batch": 2}, "give exactly one"),
        ({"tokens_per_batch": 9}, "a document has 10 bytes but tokens_per_batch is 9"),
        ({"sequences_per_batch": 0}, "sequences_per_batch is 0"),
    ],
)
def test_batch_size_errors(sizes, message) -> None:
    with pytest.raises(ValueError, match=message):
        PackedBatchSampler([10, 3], **sizes)


def test_lightning_finds_set_epoch() -> None:
    loader = PackedLoader(documents_of(RAGGED), PackedBatchSampler(RAGGED, tokens_per_batch=100))
    assert loader.batch_sampler.sampler is loader.batch_sampler


# Resuming


def contents(loader: PackedLoader, epoch: int) -> list[list[int]]:
    loader.batch_sampler.set_epoch(epoch)
    return [batch.targets.tolist() for batch in loader]


def make_loader(num_workers: int = 0) -> PackedLoader:
    sampler = PackedBatchSampler(RAGGED, tokens_per_batch=100)
    return PackedLoader(documents_of(RAGGED), sampler, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stop", [(0, 3), (1, 5)])
def test_resume_in_the_middle_of_an_epoch(num_workers, stop) -> None:
    epoch, done = stop
    whole = [contents(make_loader(), e) for e in range(3)]
    stopped = make_loader()
    for e in range(epoch):
        contents(stopped, e)
    stopped.batch_sampler.set_epoch(epoch)
    batches_seen = iter(stopped)
    for _ in range(done):
        next(batches_seen)
    state = stopped.state_dict()
    assert state == {"epoch": epoch, "batches": done}

    resumed = make_loader(num_workers)
    resumed.load_state_dict(state)
    assert len(resumed) == len(whole[0])
    assert resumed.state_dict() == state
    rest = iter(resumed)
    assert next(rest).targets.tolist() == whole[epoch][done]
    assert resumed.state_dict() == {"epoch": epoch, "batches": done + 1}
    assert [batch.targets.tolist() for batch in rest] == whole[epoch][done + 1 :]
    assert [batch.targets.tolist() for batch in resumed] == whole[epoch]
    assert contents(resumed, epoch + 1) == whole[epoch + 1]


def test_state_set_after_iter_still_counts() -> None:
    loader = make_loader()
    iterator = iter(loader)
    loader.load_state_dict({"epoch": 1, "batches": 2})
    assert [b.targets.tolist() for b in iterator] == contents(make_loader(), 1)[2:]


def test_resume_after_a_finished_epoch_starts_the_next() -> None:
    loader = make_loader()
    whole = contents(loader, 0)
    state = loader.state_dict()
    assert state["batches"] == len(whole)
    resumed = make_loader()
    resumed.load_state_dict(state)
    assert contents(resumed, 1) == contents(make_loader(), 1)
    loader.batch_sampler.set_epoch(1)
    assert loader.state_dict() == {"epoch": 1, "batches": 0}


def test_needs_torch_only() -> None:
    heavy = {"pytorch_lightning", "lightning", "hydra", "wandb", "safetensors"}
    code = (
        "import sys, flashmod.training.data, flashmod.training.packing\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
