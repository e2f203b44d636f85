"""``flashmod-verify``: measure the library against its targets, on this machine."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "flashmod-verify"
DESCRIPTION = """\
Measure the library against its targets on this machine: errors against float64 dense attention and
two other witnesses, memory, counts of rescales and tiles, dropout. Prints a table with the target
and the measured value of every line, and leaves a JSON record and a picture. Takes some minutes."""
EPILOG = """\
Without a GPU the Triton kernels run in Triton's interpreter; without Triton they are not run.
Exit codes: 0 no target was missed, 1 one was, 2 wrong usage, 130/143 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; the exit code stands in EPILOG."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    options = parser.parse_args(arguments)
    from flashmod.experiments import interrupts
    from flashmod.verify import NAMES, descriptions

    if options.list:
        for name, text in descriptions().items():
            print(f"{name:<12} {text}")
        return 0
    unknown = [name for name in options.only or () if name not in NAMES]
    if unknown:
        parser.error(f"there is no check {', '.join(unknown)}; there are {', '.join(NAMES)}")
    with interrupts.raising():
        return _verify(options, [PROGRAM, *arguments])


def _verify(options: argparse.Namespace, command: list[str]) -> int:
    import torch

    from flashmod.experiments import interrupts
    from flashmod.verify import NAMES, Suite, context, record
    from flashmod.verify.progress import Progress

    # The inputs are small: more threads take three times as long on cores that others use too.
    torch.set_num_threads(1)
    start, progress = time.perf_counter(), Progress(sys.stderr)
    runners = context.find_runners()
    surroundings = context.Context(options.seed, options.quick, runners, progress.tick)
    names = tuple(name for name in NAMES if not options.only or name in options.only)
    suite = Suite(surroundings, names, progress.started, progress.given)
    code = 0
    try:
        suite.run()
    except interrupts.Interrupted as stop:
        code = stop.exit_code
    progress.clear()
    seconds, bad = time.perf_counter() - start, any(row.bad for row in suite.rows)
    status = "interrupted" if code else "missed" if bad else "passed"
    told = {"status": status, "seconds": seconds, "command": command}
    print("\n".join(record.table(suite.rows)))
    print(record.summary(suite.rows, seconds) + ("; INTERRUPTED" if code else ""))
    written = _write(options, record.record(surroundings, suite.rows, **told))
    return code or int(bad or not written)


def _write(options: argparse.Namespace, content: dict) -> bool:
    """Write the record and the picture, and say where."""
    from flashmod.verify import picture, record

    texts = {options.json: record.to_json(content), options.picture: picture.draw(content["rows"])}
    for path, text in texts.items():
        if not text:
            print(f"{path}: not drawn, neither precision nor memory was measured", file=sys.stderr)
            continue
        try:
            record.write(path, text)
        except OSError as error:
            print(f"{PROGRAM}: cannot write {path}: {error.strerror}", file=sys.stderr)
            return False
        print(path)
    return True


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--only", nargs="+", metavar="NAME", help="these checks (see --list)")
    result.add_argument("--list", action="store_true", help="print the checks and stop")
    result.add_argument("--quick", action="store_true", help="a tenth of the cases, short inputs")
    result.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    folder = Path("runs/verify")
    for name, text in (("json", "the record"), ("picture", "the picture (SVG)")):
        suffix = "json" if name == "json" else "svg"
        path = folder / f"verify.{suffix}"
        result.add_argument(
            f"--{name}", type=Path, default=path, metavar="FILE", help=f"{text} (default: {path})"
        )
    result.add_argument("--version", action="version", version=_version())
    return result


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{PROGRAM} {version('flashmod')}"
    except PackageNotFoundError:
        from flashmod import __version__

        return f"{PROGRAM} {__version__}"


if __name__ == "__main__":
    sys.exit(main())
