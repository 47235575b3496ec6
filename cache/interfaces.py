"""What block managers have in common: devices, answers, errors, blocks and allocators.

A reference is one entry of one block table, or one standalone `Block`. A block is free (its content
is void), evictable (no references, but its content can be hit), or in use (at least one reference).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as ListOf
from enum import Enum, IntEnum
from typing import NewType

import numpy as np

_MAX_TOKEN_ID = 2**31 - 1

BlockId = NewType("BlockId", int)
SeqId = NewType("SeqId", int)


class Device(IntEnum):
    """Where a pool's blocks lie. Block ids are relative to their device."""

    GPU = 0
    CPU = 1


class AllocStatus(Enum):
    """Whether a request can have its blocks: now, after others have freed theirs, or not at all."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class NoFreeBlocksError(ValueError):
    """The pool has fewer free and evictable blocks than are needed; nothing was changed."""


class Block(ABC):
    """A view on one block of a pool. Partial, private and mutable, or full and immutable."""

    @abstractmethod
    def append_token_ids(self, token_ids: ListOf[int] | np.ndarray) -> None:
        """Write tokens into the block's empty slots.

        May change `block_id`: a shared block is copied on the first write, and a block that fills
        with content already cached becomes the cached one.

        Raises:
            ValueError: if they don't fit, or the block was freed or belongs to a block table.
            NoFreeBlocksError: if a copy is needed and no block is left.
        """

    @property
    @abstractmethod
    def block_id(self) -> BlockId | None:
        """The id on its device; None once freed."""

    @property
    @abstractmethod
    def token_ids(self) -> np.ndarray:
        """The tokens written so far, int32 [num_tokens], a copy."""

    @property
    @abstractmethod
    def num_tokens_total(self) -> int:
        """Tokens from the start of the sequence to the last one in this block."""

    @property
    @abstractmethod
    def num_empty_slots(self) -> int:
        """Slots that hold no token yet."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether no slot is empty."""

    @property
    @abstractmethod
    def prev_block(self) -> "Block | None":
        """The block before this one in its sequence, None for the first."""

    @property
    @abstractmethod
    def computed(self) -> bool:
        """Whether the KV of the block was written: another sequence may skip it."""

    @property
    @abstractmethod
    def last_accessed(self) -> float:
        """The time of the last access, as given to `mark_blocks_as_accessed`."""

    @property
    @abstractmethod
    def content_hash(self) -> int | None:
        """The chained hash; None until this block and every block before it are full."""


class BlockAllocator(ABC):
    """What hands out blocks. `device` is one of the devices that the allocator serves."""

    @abstractmethod
    def allocate_mutable(
        self, prev_block: Block | None, device: Device = Device.GPU, extra_key: object = None
    ) -> Block:
        """Take an empty block. Raises NoFreeBlocksError. `extra_key` counts for a first block."""

    @abstractmethod
    def allocate_immutable(
        self,
        prev_block: Block | None,
        token_ids: ListOf[int] | np.ndarray,
        device: Device = Device.GPU,
        extra_key: object = None,
    ) -> Block:
        """Take a full block with these tokens, the cached one if there is one.

        Raises:
            ValueError: if there are not exactly block_size tokens, each in [0, 2^31).
            NoFreeBlocksError: if none is left.
        """

    @abstractmethod
    def free(self, block: Block) -> None:
        """Give up one reference. Raises ValueError for a block that was freed before."""

    @abstractmethod
    def fork(self, last_block: Block) -> list[Block]:
        """Reference the whole chain that ends in `last_block` once more, first block first."""

    @abstractmethod
    def get_num_free_blocks(self, device: Device = Device.GPU) -> int:
        """Blocks that an allocation can take: free plus evictable."""

    @abstractmethod
    def get_num_total_blocks(self, device: Device = Device.GPU) -> int:
        """Blocks that sequences can own: all but the null block, where there is one."""

    @abstractmethod
    def get_num_full_blocks_touched(
        self, blocks: ListOf[Block], device: Device = Device.GPU
    ) -> int:
        """What swapping these distinct blocks to `device` would take off its free count."""

    @abstractmethod
    def mark_blocks_as_accessed(
        self, block_ids: ListOf[int] | np.ndarray, now: float, device: Device = Device.GPU
    ) -> None:
        """Set last_accessed. Raises ValueError for ids out of range."""

    @abstractmethod
    def mark_blocks_as_computed(
        self, block_ids: ListOf[int] | np.ndarray, device: Device = Device.GPU
    ) -> None:
        """Say that the KV of these blocks was written. Raises ValueError for ids out of range."""

    @abstractmethod
    def get_common_computed_block_ids(self, lists: ListOf[ListOf[int]]) -> list[int]:
        """The longest run of computed blocks that all lists start with; empty without caching."""

    @abstractmethod
    def find_cached_prefix(
        self, token_ids: ListOf[int] | np.ndarray, extra_key: object = None
    ) -> np.ndarray:
        """The longest run of cached, computed blocks from the start, int32 [n]; changes nothing.

        At least one token is always left to compute.
        """

    @abstractmethod
    def clear_copy_on_writes(self) -> np.ndarray:
        """Return and forget the copies to make, (source, destination) int64 [n, 2], in order."""

    @abstractmethod
    def get_prefix_cache_hit_rate(self, device: Device = Device.GPU) -> float:
        """Full blocks found in the cache as a share of those looked up; NaN before the first."""

    @abstractmethod
    def reset_prefix_cache(self, device: Device = Device.GPU) -> bool:
        """Forget all cached content. Returns False, with nothing changed, if a block is in use."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError, naming what is wrong, unless every invariant holds."""


def as_token_ids(token_ids: ListOf[int] | np.ndarray) -> np.ndarray:
    """Return tokens as contiguous int32 [n].

    Raises:
        ValueError: for values outside [0, 2^31), values that aren't integers, or another shape.
    """
    tokens = np.asarray(token_ids)
    ready = tokens.dtype == np.int32 and tokens.flags.c_contiguous and tokens.ndim == 1
    # As unsigned, a negative value is above all others: one pass instead of two.
    if ready and tokens.view(np.uint32).max(initial=0) <= _MAX_TOKEN_ID:
        return tokens
    if tokens.ndim != 1:
        raise ValueError(f"token ids have shape {tokens.shape}; expected one dimension")
    if tokens.size == 0:
        return np.zeros(0, dtype=np.int32)
    if tokens.dtype.kind not in "iu":
        good = (int, np.integer)
        bad = [t for t in token_ids if not isinstance(t, good) or not 0 <= t <= _MAX_TOKEN_ID]
        raise ValueError(
            f"token ids have dtype {tokens.dtype}, the first bad one is {[*bad, *token_ids][0]!r}; "
            "expected integers in [0, 2^31)"
        )
    low, high = tokens.min(), tokens.max()
    if low < 0 or high > _MAX_TOKEN_ID:
        raise ValueError(f"token id {low if low < 0 else high} is outside [0, 2^31)")
    return np.ascontiguousarray(tokens, dtype=np.int32)


def as_count(name: str, value: object, minimum: int) -> int:
    """Return an int. Raises ValueError, naming `name`, unless it is an integer >= minimum."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise ValueError(f"{name} is {value!r}; expected an integer >= {minimum}")
    return int(value)
