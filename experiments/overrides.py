"""Hydra's errors about the command line, reworded: the key, the value and the right form."""

import re
import sys
from collections.abc import Sequence
from importlib.resources import files

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from flashmod.training.forms import form_of, keys_of, nearest
from flashmod.training.settings import TrainConfig

GROUPS = (
    "model", "data", "batch", "attention", "optimizer", "trainer", "measure", "logger",
    "experiment", "sweep",
)  # fmt: skip


def explain(error: BaseException) -> list[str]:
    """What is wrong with the configuration, a line a problem; empty for any other error."""
    if isinstance(error, OverrideParseException):
        return [_grammar(error.override)]
    if isinstance(error, MissingConfigException):
        return [_missing(error)]
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return []
    text = "\n".join(str(e) for e in (error, error.__cause__) if e is not None)
    ambiguous = re.search(r"Ambiguous value for argument '(.*)'", text)
    if ambiguous:  # Hydra says so of every comma when a file that would allow them is missing
        return _missing_choices(sys.argv[1:]) or [_commas(ambiguous[1])]
    unknown = re.search(r"Could not override '([^']*)'", text)
    if unknown:
        added = re.search(r"use \+(\S*)", text)
        return [_unknown(added[1] if added else unknown[1])]
    return [" ".join(line.strip() for line in str(error).splitlines() if line.strip())]


def _names() -> list[str]:
    return [*keys_of(TrainConfig), *GROUPS]


def _grammar(override: str) -> str:
    key, equals, value = override.partition("=")
    key = key.lstrip("+~")
    takes = form_of(TrainConfig, key)
    if takes is None:
        return _unknown(override)
    if not equals:
        return f"{override}: not of the form key=value; {takes}"
    if takes.startswith("text"):
        takes = f"text with such signs is quoted twice, e.g. \"{key}='{value}'\""
    return f"{key}={value}: {takes}"


def _commas(override: str) -> str:
    key = override.partition("=")[0]
    takes = form_of(TrainConfig, key.lstrip("+~"))
    sweep = f"to run one job for each value: -m {override}"
    if takes is None and key not in GROUPS:
        return _unknown(override)
    if takes and "a list" in takes:  # of which the commas are part: -m would split it
        return f"{override}: {takes}"
    return f"{override}: {takes}; {sweep}" if takes else f"{override}: {sweep}"


def _unknown(override: str) -> str:
    key = override.partition("=")[0].lstrip("+~")
    group = key.partition(".")[0]
    if form_of(TrainConfig, key) is not None:
        return f"{override}: no key of the chosen file of {group}/; choose another, {group}=..."
    hint = nearest(key, _names())
    if "=" not in override and not hint:
        hint = "; settings have the form key=value, flashmod-train --help lists them"
    meant = re.search(r"did you mean (\S+)\?", hint)
    takes = form_of(TrainConfig, meant[1]) if meant else None
    return f"{override}: unknown key{hint}" + (f" ({takes})" if takes else "")


def _missing_choices(arguments: Sequence[str]) -> list[str]:
    """Chosen files that do not exist; none are named beside folders of the user's own."""
    if any(word.startswith("--config-") for word in arguments):
        return []
    problems = []
    for word in arguments:
        group, _, name = word.partition("=")
        if group not in GROUPS or not name or "," in name:
            continue
        options = [f.name[:-5] for f in files("flashmod.configs").joinpath(group).iterdir()]
        if name not in options:
            problems.append(f"{word}: there is no such file{nearest(name, options)}")
    return problems


def _missing(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file or "").rpartition("/")
    options: Sequence[str] = error.options or ()
    if not group:
        return str(error).splitlines()[0]
    if form_of(TrainConfig, group) is None and group not in GROUPS:
        return f"{group}={name}: unknown group{nearest(group, GROUPS)}"
    return f"{group}={name}: there is no such file{nearest(name, options)}"
