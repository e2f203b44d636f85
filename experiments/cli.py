"""The command line around Hydra: help, version, errors in one line, exit codes.

Exit codes: 0 all is well, 1 a run failed, 2 the configuration is wrong and nothing was started,
3 some jobs of a sweep failed, 130 interrupted by Ctrl-C, 143 by SIGTERM.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any, NoReturn

PROGRAM = "flashmod-train"
COMMAND = "FLASHMOD_COMMAND"  # environment variable
HELP = f"""\
{PROGRAM}: train a small transformer and measure its attention.

  {PROGRAM}                                        the default run
  {PROGRAM} experiment=debug                       a few seconds, every part runs
  {PROGRAM} attention=dense data.seq_len=256       choose a file of a group, set a value
  {PROGRAM} sweep=lengths                          one job for each length, flash and dense
  {PROGRAM} -m attention=flash,sdpa seed=0,1       your own sweep
  {PROGRAM} -m 'attention.tiles=[32,32],[64,64]'   a sweep over lists
  {PROGRAM} sweep=lengths hydra.sweep.dir=runs/sweeps/mine    run it again: it resumes

Groups and their files (the default of each is in train.yaml):
{{groups}}
More:
  --cfg job                  print the configuration and stop
  --config-dir DIR           your own files beside these
  -m, --multirun             sweep over values that are separated by commas
  --hydra-help               what else Hydra can do
  --version                  print the version

W&B is offline unless WANDB_MODE=online; WANDB_MODE=disabled turns it off.
Exit codes: 0 well, 1 failed, 2 wrong configuration, 3 some jobs failed, 130/143 interrupted.
"""


def main() -> NoReturn:
    """Console script: train, or sweep."""
    arguments = sys.argv[1:]
    if "--version" in arguments:
        print(f"{PROGRAM} {_version()}")
        sys.exit(0)
    if "--help" in arguments or "-h" in arguments:
        print(HELP.format(groups="\n".join(_groups())), end="")
        sys.exit(0)
    # Hydra wants all overrides side by side; -m may stand anywhere here.
    multirun = [word for word in arguments if word in ("-m", "--multirun")]
    words = [word for word in arguments if word not in multirun]
    sys.exit(_launch(multirun[:1] + words))


def _launch(arguments: list[str]) -> int:
    try:
        from flashmod.experiments import console, interrupts, jobs, sweeps
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "flashmod":
            raise
        needed = f"{error.name} is not installed, training needs it: pip install 'flashmod[train]'"
        print(f"{PROGRAM}: {needed}", file=sys.stderr)
        return 1

    console.quiet_libraries()
    # Workers of a parallel launcher have a command line of their own.
    os.environ[COMMAND] = json.dumps([sys.argv[0], *arguments])
    sys.argv[1:] = arguments
    with interrupts.raising():
        try:
            _hydra(jobs.run_job)
            _leave_process_group()
            return sweeps.finish()
        except interrupts.Interrupted as stop:
            sweeps.finish(interrupted=True)
            console.say(f"{PROGRAM}: {stop}")
            return stop.exit_code
        except jobs.RunEnded as ended:
            return 1 if ended.told else console.report_failure(PROGRAM, ended.error)
        except Exception as error:
            return console.report_failure(PROGRAM, error)


def _leave_process_group() -> None:
    """End torch's process group: its threads may end a rank with an error as the process exits."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _hydra(task: Callable[[Any], None]) -> None:
    import hydra

    # Hydra would print its errors itself and leave with exit code 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    decorate = hydra.main(
        version_base="1.3", config_path="pkg://flashmod.configs", config_name="train"
    )
    decorate(task)()


def _version() -> str:
    try:
        return version("flashmod")
    except PackageNotFoundError:
        from flashmod import __version__

        return __version__


def _groups() -> Iterator[str]:
    folders = [f for f in files("flashmod.configs").iterdir() if f.is_dir()]
    for folder in sorted(folders, key=lambda f: f.name):
        names = sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))
        if names and folder.name != "hydra":
            yield f"  {folder.name:<12} {', '.join(names)}"
