"""The bytes that kernels touch, counted in the interpreter, over those that they have to."""

import dataclasses

import torch

from kernels.testing import traffic_meter

from .config import CacheDtype, Dtype, OperationConfig, WriteConfig
from .implementations import find_implementation
from .operations import make_operation, operation_of


@dataclasses.dataclass(frozen=True)
class Metered:
    """What the interpreted kernels touched, at a shape that was reduced to `config`."""

    config: OperationConfig
    bytes_touched: int
    bytes_needed: int

    @property
    def ratio(self) -> float:
        """1.0 where no byte is touched twice, and none without need."""
        return self.bytes_touched / self.bytes_needed


def meter(config: OperationConfig) -> Metered | None:
    """Count one call at a reduced size, after its answer has been checked.

    None where the interpreter doesn't do what a GPU does: it quantises before it writes to an fp8
    cache.
    """
    if isinstance(config, WriteConfig) and config.cache_dtype is not CacheDtype.auto:
        return None
    kind = operation_of(config)
    small = kind.reduced(config)
    changes = {}
    # In the interpreter bf16 outputs take a detour over fp32; fp16 is as wide and doesn't.
    if getattr(small, "dtype", None) is Dtype.bf16:
        changes["dtype"] = Dtype.fp16
    # Partial results don't shrink with the keys: they are counted from the shapes.
    if hasattr(small, "num_splits"):
        changes["num_splits"] = 1
    small = dataclasses.replace(small, **changes)
    operation = make_operation(small, torch.device("cpu"), 0)
    call = find_implementation("prefixlab").prepare(operation)
    operation.poison()
    with traffic_meter() as traffic:
        answer = call()
    operation.check(answer)
    cost = kind.cost(small)
    touched = traffic.other_read + traffic.other_written
    return Metered(small, touched, cost.bytes_read + cost.bytes_written)
