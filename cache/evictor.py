"""Which cached block is given up when the pool is full.

An evictor keeps the blocks that have no references but still hold cached content. To add a policy,
write a `Policy` with a `name` into a new file in `cache/evictors/`; it is found there. A policy of
which each operation should handle a whole sequence in a few numpy calls has an `Evictor` of its own
besides, as LRU and FIFO do.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Protocol

import numpy as np

from . import evictors
from .block_pool import BlockPool
from .evictors.policy import POLICIES, Future, Policy

for _module in pkgutil.iter_modules(evictors.__path__):
    importlib.import_module(f"{evictors.__name__}.{_module.name}")


class Evictor(Protocol):
    """A set of evictable blocks with an order. Ids in one call are distinct, int32 [n]."""

    def __len__(self) -> int:
        """The number of evictable blocks."""
        ...

    def on_cached(self, block_ids: np.ndarray) -> None:
        """Blocks in use, in the order of their chains, filled with content not cached before."""
        ...

    def on_hit(self, block_ids: np.ndarray) -> None:
        """Cached blocks, in the order of their chains, were found by another sequence.

        They are in use: those that were evictable were removed.
        """
        ...

    def on_dropped(self, block_ids: np.ndarray) -> None:
        """Blocks in use leave the cache: they are to be freed and their content is not kept."""
        ...

    def on_uncached(self, block_ids: np.ndarray) -> None:
        """Blocks in use without cached content are to be added all the same."""
        ...

    def add(self, block_ids: np.ndarray) -> None:
        """Blocks lost their last reference and are evictable now."""
        ...

    def remove(self, block_ids: np.ndarray) -> None:
        """Evictable blocks were hit and are in use again."""
        ...

    def evict(self, count: int, incoming: np.ndarray | None = None) -> np.ndarray:
        """Remove and return the next `count` <= len(self) victims, int32 [count], in order.

        `incoming`, int64 [<= count], are the content hashes that take the first victims' places,
        where they are known.
        """
        ...

    def block_ids(self) -> np.ndarray:
        """All evictable ids, ascending."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


class PolicyEvictor:
    """Lets a `Policy`, which knows contents by key, decide over the blocks of a pool.

    A cached block's key is its content hash, so a policy recognises what it evicted before. A block
    without cached content, where such are evictable, has a key of its own and is never hit.
    """

    def __init__(self, pool: BlockPool, make_policy: Callable[[], Policy]) -> None:
        self._pool = pool
        self._make_policy = make_policy
        self._is_evictable = np.zeros(pool.num_blocks, dtype=bool)
        self.clear()

    def clear(self) -> None:
        self._is_evictable.fill(False)
        self._size = 0
        self._policy = self._make_policy()
        self._next_uncached = -(1 << 64)  # a key that no content has
        self._key_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}

    def __len__(self) -> int:
        return self._size

    def on_cached(self, block_ids: np.ndarray) -> None:
        # The last block of a chain first: of blocks alike, a suffix goes before its prefix.
        block_ids = block_ids[::-1]
        self._insert(block_ids, self._pool.content_hash[block_ids].tolist())

    def on_uncached(self, block_ids: np.ndarray) -> None:
        last = self._next_uncached - len(block_ids)
        self._insert(block_ids, list(range(self._next_uncached, last, -1)))
        self._next_uncached = last

    def _insert(self, block_ids: np.ndarray, keys: list[int]) -> None:
        depths = self._pool.depth[block_ids].tolist()
        for key, block_id, depth in zip(keys, block_ids.tolist(), depths, strict=True):
            self._key_of[block_id] = key
            self._block_of[key] = block_id
            self._policy.insert(key, depth)
        self._policy.pin(keys)

    def on_hit(self, block_ids: np.ndarray) -> None:
        hit = self._policy.hit
        for block_id in block_ids[::-1].tolist():
            hit(self._key_of[block_id])

    def on_dropped(self, block_ids: np.ndarray) -> None:
        for block_id in block_ids.tolist():
            key = self._key_of.pop(block_id)
            del self._block_of[key]
            self._policy.unpin([key])
            self._policy.forget(key)

    def add(self, block_ids: np.ndarray) -> None:
        self._is_evictable[block_ids] = True
        self._size += len(block_ids)
        self._policy.unpin([self._key_of[block_id] for block_id in block_ids.tolist()])

    def remove(self, block_ids: np.ndarray) -> None:
        self._is_evictable[block_ids] = False
        self._size -= len(block_ids)
        self._policy.pin([self._key_of[block_id] for block_id in block_ids.tolist()])

    def evict(self, count: int, incoming: np.ndarray | None = None) -> np.ndarray:
        keys = [] if incoming is None else incoming.tolist()
        keys += [None] * (count - len(keys))
        victims = np.empty(count, dtype=np.int32)
        for i, key in enumerate(keys):
            victim = self._block_of.pop(self._policy.evict(key))
            del self._key_of[victim]
            victims[i] = victim
        self._is_evictable[victims] = False
        self._size -= count
        return victims

    def block_ids(self) -> np.ndarray:
        return np.flatnonzero(self._is_evictable).astype(np.int32)


def make_policy(
    name: str, capacity: int, block_size: int = 1, future: Future | None = None
) -> Policy:
    """Return a new policy. Raises ValueError for an unknown name or a future that is missing."""
    check_policy(name)
    return POLICIES[name](capacity, block_size, future)


def check_policy(name: object) -> None:
    """Raise ValueError unless this is the name of a policy."""
    if name not in POLICIES:
        raise ValueError(f"evictor is {name!r}; expected one of {', '.join(sorted(POLICIES))}")


EvictorChoice = str | Callable[[BlockPool], Evictor]


def make_evictor(choice: EvictorChoice, pool: BlockPool, future: Future | None = None) -> Evictor:
    """Return a new evictor for a pool. Raises ValueError as `make_policy` does.

    `choice` is the name of a policy or a function such as
    `functools.partial(make_evictor, "belady", future=future)`.
    """
    if callable(choice):
        return choice(pool)

    def policy() -> Policy:
        return make_policy(choice, max(1, pool.num_blocks), pool.block_size, future)

    array_evictor = policy().evictor_type
    return PolicyEvictor(pool, policy) if array_evictor is None else array_evictor(pool)
