"""What a run ran on: host, processor, GPU, driver, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import flashmod

DISTRIBUTIONS = {
    "torch": "torch",
    "triton": "triton",
    "pytorch_lightning": "pytorch-lightning",
    "hydra": "hydra-core",
    "wandb": "wandb",
}


def environment() -> dict[str, Any]:
    """The ``environment`` entry of ``result.json``; what is unknown is None."""
    return {
        "host": platform.node(),
        "os": platform.platform(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver(),
        "python": platform.python_version(),
        "commit": commit(),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Versions of flashmod and of what it runs on, None where it is not installed."""
    found: dict[str, str | None] = {"flashmod": flashmod.__version__}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["torch"] = torch.__version__  # with its build, such as +cpu
    return found


def cpu_name() -> str:
    """The processor's model, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def commit() -> str | None:
    """The commit of the source tree that flashmod runs from, ``-dirty`` if it was changed."""
    root = Path(flashmod.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    return _output(
        "git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )


def driver() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    query = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return query.splitlines()[0] if query else None


def unused_nvidia_gpu() -> str | None:
    """Why torch cannot use the NVIDIA device of this machine and what to do; None if all is well.

    A hint, not an error: training goes on, on the CPU.
    """
    if torch.cuda.is_available() or not nvidia_present():
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is a build without CUDA"
        fix = (
            "install a CUDA build of torch, e.g. make train "
            'PIP_ARGS="--extra-index-url <the package index of that build>"'
        )
    else:
        reason = _cuda_error()
        fix = (
            f"install a driver that supports CUDA {torch.version.cuda}, or a build of torch that "
            'fits the driver, e.g. make train PIP_ARGS="--extra-index-url <the package index of '
            'that build>"'
        )
    return f"This machine has an NVIDIA device that torch cannot use: {reason}. To use it, {fix}."


def nvidia_present() -> bool:
    """Whether an NVIDIA device or its driver is visible here."""
    if any(Path(path).exists() for path in ("/dev/nvidia0", "/proc/driver/nvidia/version")):
        return True
    return bool(_output("nvidia-smi", "-L"))


def _cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return "torch.cuda.is_available() is False"


def _output(*command: str) -> str | None:
    """What ``command`` prints, None if it is missing, fails or takes longer than 10 s."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
