"""Block management for a paged KV cache: decides, in integers, which blocks a sequence owns.

Imports numpy, and neither torch nor triton.
"""

from .block_manager import BlockSpaceManager
from .block_table import BlockTable
from .content_hash import ContentHasher, ExtraKey
from .cpu_gpu import CpuGpuBlockAllocator
from .interfaces import AllocStatus, Block, BlockAllocator, Device, NoFreeBlocksError
from .naive import NaiveBlock, NaiveBlockAllocator
from .prefix_caching import PrefixCachingBlock, PrefixCachingBlockAllocator
from .sequence import Sequence, SequenceGroup, SequenceStatus

__all__ = [
    "AllocStatus",
    "Block",
    "BlockAllocator",
    "BlockSpaceManager",
    "BlockTable",
    "ContentHasher",
    "CpuGpuBlockAllocator",
    "Device",
    "ExtraKey",
    "NaiveBlock",
    "NaiveBlockAllocator",
    "NoFreeBlocksError",
    "PrefixCachingBlock",
    "PrefixCachingBlockAllocator",
    "Sequence",
    "SequenceGroup",
    "SequenceStatus",
]
