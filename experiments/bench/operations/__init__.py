"""The operations that can be measured: one file a kind, each with inputs, cost and check."""

import torch

from ..config import (
    CopyConfig,
    DecodeConfig,
    GatherConfig,
    HashConfig,
    MatchConfig,
    MatchGatherConfig,
    MergeConfig,
    OperationConfig,
    PrefillConfig,
    SwapConfig,
    WriteConfig,
)
from .attention import Attention
from .block_moves import CopyBlocks, GatherBlocks, SwapBlocks
from .merge_states import MergeStates
from .operation import Operation
from .prefix_hash import HashBlocks, MatchPrefix, PrefixHashGather
from .write_kv import WriteKV

OPERATIONS: dict[type[OperationConfig], type[Operation]] = {
    DecodeConfig: Attention,
    PrefillConfig: Attention,
    MergeConfig: MergeStates,
    WriteConfig: WriteKV,
    CopyConfig: CopyBlocks,
    GatherConfig: GatherBlocks,
    SwapConfig: SwapBlocks,
    HashConfig: HashBlocks,
    MatchConfig: MatchPrefix,
    MatchGatherConfig: PrefixHashGather,
}


def operation_of(config: OperationConfig) -> type[Operation]:
    """The operation that a configuration is of."""
    return OPERATIONS[type(config)]


def make_operation(config: OperationConfig, device: torch.device, seed: int) -> Operation:
    """Draw the inputs of an operation."""
    return operation_of(config)(config, device, seed)
