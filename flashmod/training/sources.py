"""Where byte documents come from: Python's standard library, or a seeded generator."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random

LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"}


def stdlib_documents(unit: str = "function") -> list[bytes]:
    """Functions (or whole files) of the running Python's standard library, in path order.

    Tests, idlelib, lib2to3 and installed packages are left out. The corpus differs between
    Python builds: compare runs by its hash. A function inside a function is part of the
    outer one and no document of its own.

    Args:
        unit: ``"function"`` or ``"file"``.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents: list[bytes] = []
    for path in _stdlib_files(root):
        source = path.read_bytes()
        documents.extend(_functions(source) if unit == "function" else [source])
    return [document for document in documents if document.strip()]


def _stdlib_files(root: Path) -> list[Path]:
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in relative if not LEFT_OUT.intersection(path.parts)]
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def _functions(source: bytes) -> Iterator[bytes]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    # Slicing lines is 20 times faster than ast.get_source_segment on the whole library.
    lines = source.splitlines(keepends=True)
    for node in _outermost_functions(tree):
        yield b"".join(lines[node.lineno - 1 : node.end_lineno])


def _outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _outermost_functions(child)


def synthetic_documents(
    count: int, seq_len: int, *, fixed: bool = False, seed: int = 0
) -> list[bytes]:
    """Documents of a random second-order Markov chain over 64 byte values.

    Integer arithmetic on the Mersenne Twister only, so equal arguments give equal bytes on
    every machine. After two given bytes one of 4 follows, with weights 8 : 4 : 3 : 1, so
    about 1.7 bits per byte remain for a model that sees both, against about 6 for the
    byte frequencies.

    Args:
        count: number of documents.
        seq_len: longest document, in bytes.
        fixed: every document has ``seq_len`` bytes; else lengths are log-normal with
            median ``seq_len / 3``, cut off at ``seq_len``.
        seed: equal seeds give equal documents.
    """
    rng = Random(seed)
    table = [_successors(rng) for _ in range(4 * 64)]
    documents = []
    for _ in range(count):
        length = seq_len if fixed else min(seq_len, _lognormal(rng, max(seq_len // 3, 1)))
        documents.append(_chain(rng, table, length))
    return documents


def _successors(rng: Random) -> bytes:
    """16 entries, of which a random one is drawn to continue: the weights of 4 symbols."""
    symbols = [rng.getrandbits(6) for _ in range(4)]
    return bytes(symbols[i] for i in (0,) * 8 + (1,) * 4 + (2,) * 3 + (3,))


def _chain(rng: Random, table: list[bytes], length: int) -> bytes:
    before, last = 0, rng.getrandbits(6)
    out = bytearray()
    for draw in rng.getrandbits(8 * length).to_bytes(length, "little"):
        out.append(last + 32)  # printable
        before, last = last, table[(before & 3) * 64 + last][draw & 15]
    return bytes(out)


def _lognormal(rng: Random, median: int) -> int:
    """A log-normal integer of at least 1: an octave for 4 steps of a near-normal binomial."""
    # Thousandths of 2 ** (0/4, 1/4, 2/4, 3/4): no library's exp may round differently.
    quarter = (1000, 1189, 1414, 1682, 2000)
    n = rng.getrandbits(47).bit_count() - 24  # -0.5 on average, made up for by the fraction
    low, high = quarter[n % 4], quarter[n % 4 + 1]
    scaled = median * (low * 256 + (high - low) * rng.getrandbits(8))
    octave = n // 4
    scaled = scaled << octave if octave >= 0 else scaled >> -octave
    return max(1, scaled // 256_000)
