"""Compiling the kernels of an operation for GPUs that are not here, in a process of its own.

The interpreter, in which traffic is metered, replaces Triton's own functions, so nothing can be
compiled beside it. That takes a second process, which lives as long as this one. What is at the top
of this file must not import Triton.
"""

import atexit
import dataclasses
import functools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.offline import Report

    from .config import OperationConfig


def compile_elsewhere(config: "OperationConfig", target_name: str) -> "list[Report]":
    """What `compile_operation` gives, from the other process."""
    return _compiler().submit(compile_operation, config, target_name).result()


@functools.cache
def _compiler() -> ProcessPoolExecutor:
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    atexit.register(executor.shutdown)
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    try:
        # Its process starts with the first task, and with the environment of that moment.
        executor.submit(os.getpid).result()
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret
    return executor


def compile_operation(config: "OperationConfig", target_name: str) -> "list[Report]":
    """A report for each kernel that this project launches for an operation, in their order.

    Nothing runs: tensors are small and on the CPU, and launches are recorded. Raises what Triton
    raises for what can't be compiled.
    """
    import torch

    from kernels.launch import TARGETS, record_launches
    from kernels.offline import OfflineCase, compile_launch

    from .config import AttentionConfig
    from .implementations import find_implementation
    from .implementations.prefixlab import launched_splits
    from .operations import make_operation, operation_of

    target = TARGETS[target_name]
    small = operation_of(config).reduced(config, to_compile=True)
    if isinstance(config, AttentionConfig):
        # Keys that are split go through another variant, and through a merge.
        small = dataclasses.replace(small, num_splits=min(launched_splits(config, target), 2))
    # Getting ready may launch kernels, too; what counts is the call.
    with record_launches(target):
        operation = make_operation(small, torch.device("cpu"), 0)
        call = find_implementation("prefixlab").prepare(operation)
    with record_launches(target) as launches:
        call()
    case = OfflineCase(config.name, "", lambda: None, tokens_argument="TILE_N")
    return [compile_launch(launch, case, target) for launch in launches]
