"""``flashmod-compare``: a model before and after the swap, or the attention that source calls."""

import argparse
import importlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = "flashmod-compare"
DESCRIPTION = """\
Run a training step of your model as it is and with its attention swapped, on the same batch and
seed, and print what changed: errors against float64, memory, time. The table and every number
are also written as result.json, which flashmod-report shows.

  flashmod-compare train:model_and_batch
  flashmod-compare models/vit.py:make_vit --shape 4,197,768 --no-weights
  flashmod-compare --scan src notebooks        name the attention that source calls, run nothing

The factory returns (model, batch), (model, batch, loss_fn), or a model where --shape is given."""
EPILOG = "Exit codes: 0 well, 1 the model failed, 2 nothing was started (wrong arguments)."


class WrongArguments(Exception):
    """Nothing was started; the message says what to write instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point.

    Returns:
        0 when all is well, 1 when the model or the comparison failed, 2 for wrong arguments.
    """
    given = parser()
    args = given.parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        if bool(args.scan) == bool(args.factory):
            raise WrongArguments("give MODULE:FACTORY, or --scan PATH...")
        return scan(args.scan) if args.scan else compare(args)
    except WrongArguments as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("factory", nargs="?", metavar="MODULE:FACTORY", help="or FILE.py:FACTORY")
    add("--scan", nargs="+", metavar="PATH", help="files, notebooks or folders to read instead")
    add("--shape", type=_shape, metavar="N,S,E", help="of a batch of seeded normal numbers")
    add("--causal", action="store_true", help="swap with a causal mask")
    add("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="swap with a window")
    add("--no-weights", action="store_true", help="swap with need_weights=False")
    add("--always-call", action="store_true", help="no fused code of torch in eval mode")
    add("--backend", choices=("tiled", "triton"), help="default: by the device")
    add("--eval", action="store_true", help="eval mode (default: the mode it comes in)")
    add("--seed", type=int, default=0)
    add("--repeats", type=int, default=5, help="timed steps on each side (default: 5)")
    add(
        "--time-limit",
        type=float,
        default=30.0,
        metavar="S",
        help="of the float64 copy, and of the timed steps",
    )
    add("-o", "--output", metavar="DIR", help="default: runs/compare/<time>")
    add("--version", action="version", version=_version())
    return result


def scan(paths: Sequence[str]) -> int:
    """Print the attention that is called below ``paths``."""
    from flashmod.integrations.sources import scan_paths

    try:
        print(scan_paths(paths))
    except FileNotFoundError as error:
        raise WrongArguments(str(error)) from error
    return 0


def compare(args: argparse.Namespace) -> int:
    """Compare, print and write the record, which also says when it failed."""
    import flashmod
    from flashmod.training.records import RunRecord

    model, batch, loss_fn = _made(args)
    directory = Path(args.output or time.strftime("runs/compare/%Y-%m-%d_%H-%M-%S"))
    options = {
        "causal": args.causal,
        "window": tuple(args.window) if args.window else None,
        "always_call": args.always_call,
        "backend": args.backend,
    }
    options = {name: value for name, value in options.items() if value}
    if args.no_weights:
        options["need_weights"] = False
    try:
        found = flashmod.compare(
            model, batch, loss_fn, seed=args.seed, repeats=args.repeats,
            time_limit_s=args.time_limit, **options,
        )  # fmt: skip
        print(found)
        print(f"record: {found.save(directory)}")
    except Exception as error:
        print(f"{PROGRAM}: {type(error).__name__}: {error}", file=sys.stderr)
        config = {"attention": {"kind": "flash"}, "model": {"name": type(model).__name__}}
        record = RunRecord(
            directory, name=args.factory, command=list(sys.argv), overrides=[], config=config,
            seed=args.seed, task="compare",
        )  # fmt: skip
        record.finish("failed", error)
        return 1
    return 0


def _made(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The model, the batch and the loss that the factory and the arguments give."""
    import torch
    from torch import nn

    factory = _load(args.factory)
    torch.manual_seed(args.seed)
    made = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    model, batch, loss_fn = (
        (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    )
    if not isinstance(model, nn.Module) or (isinstance(made, tuple) and len(made) not in (2, 3)):
        raise WrongArguments(
            f"{args.factory} gave {type(made).__name__}: return (model, batch), (model, batch, "
            "loss_fn), or a model and pass --shape"
        )
    if args.shape:
        tensor = next(model.parameters(), torch.empty(0))
        batch = torch.randn(args.shape).to(tensor)
    if batch is None:
        raise WrongArguments(f"{args.factory} gave a model without a batch: pass --shape N,S,E")
    if args.eval:
        model.eval()
    return model, batch, loss_fn


def _load(path: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` names."""
    module_name, _, name = path.rpartition(":")
    if not module_name:
        raise WrongArguments(f"{path!r} names no factory: write MODULE:FACTORY or FILE.py:FACTORY")
    sys.path.insert(0, os.getcwd())  # as python -m does
    if module_name.endswith(".py") and not Path(module_name).is_file():
        raise WrongArguments(f"{module_name} does not exist")
    try:
        module = _from_file(module_name) if module_name.endswith(".py") else (
            importlib.import_module(module_name)
        )  # fmt: skip
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise WrongArguments(f"there is no module {error.name!r} here") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise WrongArguments(f"{module_name} has no {part!r}")
        found = getattr(found, part)
    return found


def _from_file(path: str) -> Any:
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{PROGRAM} {version('flashmod')}"
    except PackageNotFoundError:
        from flashmod import __version__

        return f"{PROGRAM} {__version__}"


if __name__ == "__main__":
    sys.exit(main())
