"""``python -m flashmod.kernel_report``: what the compiler makes of the kernels, as a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import TARGETS, Compiled, Facts, compiling_for, read, require_compiler

_COLUMNS = (
    "target kernel variant dtype D tile warps stages registers spills in-loop shared tensor-core "
    "note"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print one line per kernel, and return 1 if one of them cannot run on its target."""
    parser = argparse.ArgumentParser(prog="python -m flashmod.kernel_report", description=__doc__)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--variant", nargs="+", default=["plain"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--golden", type=Path, help="write the record of plain main loops there")
    options = parser.parse_args(argv)
    try:
        require_compiler()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    if options.golden:
        from .golden import write

        write(options.golden)
        return 0
    failed = False
    print("\t".join(_COLUMNS.split()), flush=True)
    for line, good in _lines(options):
        print(line, flush=True)
        failed |= not good
    return int(failed)


def _lines(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    from .cases import DTYPES, launch_all

    for name in options.target:
        for variant in options.variant:
            for dtype in options.dtype:
                for head_dim in options.head_dim:
                    with compiling_for(TARGETS[name]) as records:
                        launch_all(variant, DTYPES[dtype], head_dim)
                    for compiled in records:
                        facts = read(compiled, TARGETS[name])
                        yield _line(name, variant, dtype, head_dim, compiled, facts)


def _line(
    target: str, variant: str, dtype: str, head_dim: int, compiled: Compiled, facts: Facts
) -> tuple[str, bool]:
    constants = compiled.constants
    tile = f"{constants['BLOCK_M']}x{constants.get('BLOCK_N', '-')}"
    notes = ["" if facts.fits else "too much shared memory", "holds a trap" if facts.trap else ""]
    cells = (
        target, compiled.name.removesuffix("_kernel"), variant, dtype, head_dim, tile,
        constants.get("num_warps", "-"), constants.get("num_stages", "-"), facts.registers,
        facts.spills, "-" if facts.loop_spills is None else facts.loop_spills, facts.shared,
        facts.tensor_core, ", ".join(filter(None, notes)) or "ok",
    )  # fmt: skip
    return "\t".join(map(str, cells)), facts.fits and not facts.trap


if __name__ == "__main__":
    sys.exit(main())
