"""``flashmod-report``: turn the records of runs and sweeps into one HTML page."""

import argparse
import logging
import sys
import webbrowser
from collections.abc import Sequence

DESCRIPTION = """\
Read every result.json below the folders (runs and sweeps of flashmod-train) and write one
self-contained HTML page: what the runs show, charts of memory, gradient error and throughput
against sequence length, training curves, and a table of all runs. The page needs no network."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point.

    Returns:
        0 when the page (or the text) was made, 1 when it could not be written or a package is
        missing, 2 when a folder holds no record.
    """
    args = parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    from flashmod import report

    try:
        if args.text:
            print(report.as_text(args.dirs))
            return 0
        if args.figure:
            print(report.figure(args.dirs, args.figure))
            return 0
        path = report.write(args.dirs, args.output)
    except report.NoRecordsError as error:
        print(f"flashmod-report: {error}", file=sys.stderr)
        return 2
    except (ImportError, OSError) as error:
        print(f"flashmod-report: {error}", file=sys.stderr)
        return 1
    if args.open:
        webbrowser.open(path.resolve().as_uri())
    print(path)
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="flashmod-report",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("dirs", nargs="+", metavar="DIR", help="a run, a sweep, or a folder above")
    result.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the page to write (default: report.html in the first DIR)",
    )
    result.add_argument("--text", action="store_true", help="print a table instead of a page")
    result.add_argument(
        "--figure", metavar="FILE", help="write the chart of memory against length alone, as SVG"
    )
    result.add_argument("--open", action="store_true", help="show the page in a browser")
    result.add_argument("--version", action="version", version=_version())
    return result


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"flashmod-report {version('flashmod')}"
    except PackageNotFoundError:
        from flashmod import __version__

        return f"flashmod-report {__version__}"


if __name__ == "__main__":
    sys.exit(main())
