"""Chooses the Triton backend before any kernel module is imported."""

import os

# Many small matrix products run next to each other here; threads for each would fight for cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no GPU, with the reason."""
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
