"""Trained weights as safetensors, and a model rebuilt from a run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import ModelConfig
from .transformer import Transformer

RECORD, WEIGHTS = "result.json", "best.safetensors"


def save(state_dict: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Write tensors to ``path`` as safetensors; the file is whole or not there.

    Raises:
        ImportError: without the ``safetensors`` package.
    """
    safetensors_torch = _safetensors()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # safetensors refuses tensors that share memory, as tied weights do.
    tensors = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in state_dict.items()}
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        safetensors_torch.save_file(tensors, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(
    run_dir: str | os.PathLike[str],
    *,
    attention: str | None = None,
    device: torch.device | str = "cpu",
) -> Transformer:
    """Rebuild the trained model of a run, with its best weights, in eval mode.

    Args:
        run_dir: holds ``result.json`` and ``best.safetensors``.
        attention: ``"flash"``, ``"sdpa"`` or ``"dense"``; that of the run by default. Backend
            and tile sizes are chosen anew, since this machine may be another.
        device: where the model goes.

    Raises:
        FileNotFoundError: when a file is missing.
        ValueError: when the record holds no model, or the weights do not fit it.
        ImportError: without the ``safetensors`` package.
    """
    run_dir = Path(run_dir)
    record, weights = run_dir / RECORD, run_dir / WEIGHTS
    for path in (record, weights):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: {run_dir} is no finished training run")
    config = json.loads(record.read_text(encoding="utf-8")).get("config") or {}
    if not isinstance(config.get("model"), dict):
        found = ", ".join(config) or "nothing"
        raise ValueError(f"{record} holds no config.model to build from; its config has {found}")
    kind = attention or (config.get("attention") or {}).get("kind", "flash")
    model = Transformer(ModelConfig.from_dict(config["model"]), kind)
    try:
        model.load_state_dict(_safetensors().load_file(weights))
    except RuntimeError as error:
        raise ValueError(f"{weights} does not fit config.model of {record}: {error}") from error
    return model.eval().to(device)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("reading and writing weights needs: pip install safetensors") from error
    return safetensors.torch
