"""Seeds, poisoned memory and quiet defaults for every test."""

import os
import random
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the suite runs one process per core
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode wants it on CUDA

import pytest
import torch
from hypothesis import settings

# Triton reads this once, when a kernel module is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)

# Derandomised, so that a red test is red again on the next machine; no deadline, since the first
# call of a kernel is much slower than the rest.
settings.register_profile("flashmod", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("flashmod")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill every new uninitialised tensor with NaN (integers: the largest, bools: True).

    torch does so in its deterministic mode, inside its own operators too; the mode only warns
    about the few operators that have no deterministic form.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warned)


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """Let no test see what another one compiled: Dynamo counts compilations by code object."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
