"""What is measured: an operation at one shape, with its inputs, its cost and its check."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from kernels.offline import DTYPES

from ..config import CacheDtype, Dtype, HeadsConfig, OperationConfig

C = TypeVar("C", bound=OperationConfig)


class WrongAnswerError(Exception):
    """An implementation gave another answer than the definition of the operation."""


@dataclass(frozen=True)
class Cost:
    """What an operation has to do at least, counted from its shapes.

    Attributes:
        bytes_read, bytes_written: each distinct byte once, whatever the implementation does.
        flops: of the matrix products; a multiplication and an addition are two.
        link: what the bytes pass through: the device's memory, or the bus to or from the host,
            where each byte that is read crosses once.
        unit, num_units: what users count beside bytes, such as prompts.
    """

    bytes_read: int
    bytes_written: int
    flops: int = 0
    link: str = "memory"
    unit: str = ""
    num_units: int = 0

    @property
    def bytes_moved(self) -> int:
        """The bytes that pass through the link."""
        if self.link != "memory":
            return self.bytes_read
        return self.bytes_read + self.bytes_written


class Operation(ABC, Generic[C]):
    """An operation on inputs that were drawn for one shape and device.

    Attributes:
        kind: what implementations say they offer; operations of one kind differ in shape alone.
        config, device: as given.
    """

    kind: ClassVar[str]

    def __init__(self, config: C, device: torch.device, seed: int) -> None:
        self.config = config
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    @classmethod
    @abstractmethod
    def cost(cls, config: C) -> Cost:
        """What the operation has to do at least, from its shape alone."""

    @classmethod
    @abstractmethod
    def reduced(cls, config: C, *, to_compile: bool = False) -> C:
        """The same kind of call at a size that the interpreter can bear.

        With `to_compile` nothing is run: sizes that choose another variant of a kernel stay.
        """

    @abstractmethod
    def poison(self) -> None:
        """Overwrite the outputs, so that an earlier answer cannot pass for a new one."""

    @abstractmethod
    def check(self, answer: Any) -> None:
        """Raise WrongAnswerError unless `answer`, what a call returned, is right."""

    def randn(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Normally distributed values, also in fp8."""
        drawn = dtype if dtype.itemsize > 1 else torch.bfloat16
        return torch.randn(shape, dtype=drawn, device=self.device, generator=self.generator).to(
            dtype
        )

    def shuffled(self, count: int) -> torch.Tensor:
        """The integers below `count` in random order, int64 [count]."""
        return torch.randperm(count, device=self.device, generator=self.generator)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch dtype of that name."""
    return DTYPES[dtype.value]


def cache_torch_dtype(cache_dtype: CacheDtype, dtype: Dtype) -> torch.dtype:
    """The torch dtype of the KV cache."""
    return DTYPES[dtype.value if cache_dtype is CacheDtype.auto else cache_dtype.value]


def block_bytes(config: HeadsConfig) -> int:
    """The bytes of one block of keys, or of values, in one layer."""
    elements = config.block_size * config.num_kv_heads * config.head_size
    return elements * torch_dtype(config.dtype).itemsize


def require(condition: bool | torch.Tensor, message: str) -> None:
    """Raise WrongAnswerError with this message unless the condition holds."""
    if not condition:
        raise WrongAnswerError(message)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, in which NaNs compare, too. The last axis has to be contiguous."""
    return tensor.view(torch.uint8)


def spread(count: int, most: int) -> Sequence[int]:
    """Up to `most` of the integers below `count`, evenly spread, the first and last among them."""
    if count <= most:
        return range(count)
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def limited(config: C, **most: int) -> C:
    """A copy of `config` in which no named number is above its limit."""
    return dataclasses.replace(
        config, **{key: min(getattr(config, key), limit) for key, limit in most.items()}
    )
