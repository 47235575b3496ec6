"""Chooses the Triton backend before any kernel module is imported."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture
def launch_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Launches an app's main in this process, in a folder of its own; returns its exit status."""
    monkeypatch.chdir(tmp_path)
    handlers, level = list(logging.root.handlers), logging.root.level

    def start(main: Callable[[], object], *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["app.py", *arguments])
        try:
            main()
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
                return 1
            return end.code or 0
        return 0

    yield start
    logging.root.handlers[:], logging.root.level = handlers, level
