"""Merging partial attention results by their log-sum-exp."""

from typing import Any

import torch

from kernels import reference
from kernels.testing import assert_within_budget, poison_, poisoned

from ..config import MergeConfig
from .operation import Cost, Operation, WrongAnswerError, limited, torch_dtype


class MergeStates(Operation[MergeConfig]):
    """
    Attributes:
        outs: [num_states, num_tokens, num_heads, head_size]. lses: float32, without the last axis.
        out, lse: the first state's shapes, written.
    """

    kind = "merge_states"

    def __init__(self, config: MergeConfig, device: torch.device, seed: int) -> None:
        super().__init__(config, device, seed)
        rows = (config.num_tokens, config.num_heads)
        dtype = torch_dtype(config.dtype)
        self.outs = self.randn(config.num_states, *rows, config.head_size, dtype=dtype)
        self.lses = self.randn(config.num_states, *rows, dtype=torch.float32)
        self.out = poisoned(*rows, config.head_size, dtype=dtype, device=device)
        self.lse = poisoned(*rows, dtype=torch.float32, device=device)

    @classmethod
    def cost(cls, config: MergeConfig) -> Cost:
        rows = config.num_tokens * config.num_heads
        state_bytes = rows * (config.head_size * torch_dtype(config.dtype).itemsize + 4)
        return Cost(config.num_states * state_bytes, state_bytes)

    @classmethod
    def reduced(cls, config: MergeConfig, *, to_compile: bool = False) -> MergeConfig:
        return limited(config, num_tokens=4)

    def poison(self) -> None:
        poison_(self.out)
        poison_(self.lse)

    def check(self, answer: Any) -> None:
        """(out, lse) against float64."""
        exact = reference.merge_states(self.outs.double(), self.lses.double())
        eager = reference.merge_states(self.outs, self.lses)
        for name, *triple in zip(("out", "lse"), answer, exact, eager, strict=True):
            try:
                assert_within_budget(*triple)
            except AssertionError as error:
                raise WrongAnswerError(f"{name}: {error}") from None
