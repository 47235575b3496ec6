"""The block manager's rules in plain Python: dicts, lists and a heap, one block at a time.

It is the oracle of the property tests and the baseline of the benchmarks, so it is written to be
read and to be reasonably fast, and knows nothing of the arrays in `cache`. It uses no numpy.

The rules that decide which id goes where:

- A new block is the id given back last, then the lowest id never used, then the next victim.
  Without `reuse_uncached_first`, all blocks given back are victims to be, cached or not.
- The victim is the evictable block of the lowest rank (LRU: last access; FIFO: when it entered the
  cache, one number an operation), then the deepest in its chain, then the lowest id.
- A table is released last block first; of several tables the last one first.
- An append takes all blocks first, row after row, then writes, then shares or registers what
  has filled.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GPU, CPU = 0, 1

Key = tuple[int, tuple[int, ...]]  # the hash before a block and its tokens
Entry = tuple[float, int, int]  # rank, minus depth, block id: the least is evicted first
Pair = tuple[int, int]  # a block to copy from and one to copy to


class ModelFull(Exception):
    """Fewer free and evictable blocks than needed; nothing was changed."""


class ModelBlock:
    """One block, in use or evictable."""

    __slots__ = (
        "block_id",
        "cached",
        "computed",
        "depth",
        "entered",
        "in_prefill",
        "key",
        "last_accessed",
        "refs",
        "tokens",
    )

    def __init__(self, block_id: int, depth: int, tokens: list[int]) -> None:
        self.block_id = block_id
        self.depth = depth
        self.tokens = tokens
        self.refs = 1
        self.key: Key | None = None
        self.cached = False
        self.computed = False
        self.in_prefill = False
        self.last_accessed = 0.0
        self.entered = 0


@dataclass(slots=True)
class ModelTable:
    """One sequence's blocks; None stands for the null block of a sliding window."""

    root: int
    device: int
    blocks: list[ModelBlock | None]
    length: int
    num_cached_tokens: int = 0
    num_null: int = 0


@dataclass(slots=True)
class ModelStats:
    """As `cache.stats.CacheStats` defines them."""

    lookups: int = 0
    hits: int = 0
    evictions: int = 0
    copies: int = 0
    promotions: int = 0


class ModelPool:
    """The blocks of one device."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool,
        lru: bool,
        first_id: int = 0,
        reuse_uncached_first: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.total = num_blocks - first_id
        self.block_size = block_size
        self.caching = caching
        self.lru = lru
        self.first_id = first_id
        self.reuse_uncached_first = reuse_uncached_first
        self.clear()

    def clear(self) -> None:
        """As a new pool."""
        self.recycled: list[int] = []
        self.next_fresh = self.first_id
        self.index: dict[Key, ModelBlock] = {}
        # A heap entry is live where it is the one that its block has in `evictable`.
        self.evictable: dict[int, tuple[Entry, ModelBlock]] = {}
        self.heap: list[Entry] = []
        self.operation = 0
        self.copies: dict[int, int] = {}
        self.stats = ModelStats()

    @property
    def num_free(self) -> int:
        """Free and evictable blocks."""
        return len(self.recycled) + self.num_blocks - self.next_fresh + len(self.evictable)

    def require(self, count: int) -> None:
        """Raise unless `count` blocks can be taken."""
        if count > self.num_free:
            raise ModelFull(f"{count} of {self.num_free}")

    def take(self, depth: int, tokens: list[int]) -> ModelBlock:
        """Take one block, evicting if there is no free one."""
        if self.recycled:
            return ModelBlock(self.recycled.pop(), depth, tokens)
        if self.next_fresh < self.num_blocks:
            self.next_fresh += 1
            return ModelBlock(self.next_fresh - 1, depth, tokens)
        while True:
            entry = heapq.heappop(self.heap)
            held = self.evictable.get(entry[2])
            if held and held[0] == entry:
                break
        victim = held[1]
        del self.evictable[victim.block_id]
        if victim.cached:
            self.unregister(victim)
            self.stats.evictions += 1
        return ModelBlock(victim.block_id, depth, tokens)

    def reference(self, block: ModelBlock, count: int = 1) -> None:
        """Add references; an evictable block is in use again."""
        if not block.refs:
            del self.evictable[block.block_id]
        block.refs += count

    def release(self, block: ModelBlock) -> None:
        """Give up one reference. Cached content that was never computed is not kept."""
        block.refs -= 1
        if block.refs:
            return
        self.copies.pop(block.block_id, None)
        if block.cached and not block.computed:
            self.unregister(block)
        if block.cached or not self.reuse_uncached_first:
            rank = block.last_accessed if self.lru else block.entered
            entry = (rank, -block.depth, block.block_id)
            self.evictable[block.block_id] = entry, block
            heapq.heappush(self.heap, entry)
            if len(self.heap) > 2 * len(self.evictable) + 64:
                self.heap = [live for live, _ in self.evictable.values()]
                heapq.heapify(self.heap)
            return
        self.recycled.append(block.block_id)

    def register(self, block: ModelBlock) -> None:
        """Enter a full block into the cache unless its content is there already."""
        if block.key not in self.index:
            self.index[block.key] = block
            block.cached = True
            block.entered = self.operation

    def unregister(self, block: ModelBlock) -> None:
        """Take a block's content out of the cache."""
        del self.index[block.key]
        block.cached = False

    def record_copy(self, source: ModelBlock, target: ModelBlock) -> None:
        """Note a copy; a source that waits for one itself stands for that copy's source."""
        source_id = self.copies.get(source.block_id, source.block_id)
        self.copies.setdefault(target.block_id, source_id)


class CacheModel:
    """Two pools and the tables over them. Sequences go by any hashable id."""

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        watermark: float = 0.0,
        sliding_window: int | None = None,
        enable_caching: bool = False,
        evictor: str = "lru",
        reuse_uncached_first: bool = True,
    ) -> None:
        self.block_size = block_size
        self.caching = enable_caching
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.window_blocks = None
        first_id = 0
        if sliding_window is not None:
            self.window_blocks = sliding_window // block_size + 1
            first_id = 1
        lru = evictor == "lru"
        self.pools = [
            ModelPool(
                num_gpu_blocks, block_size, enable_caching, lru, first_id, reuse_uncached_first
            ),
            ModelPool(num_cpu_blocks, block_size, enable_caching, lru, 0, reuse_uncached_first),
        ]
        self.tables: dict[object, ModelTable] = {}

    # -- admission

    def _keys(self, tokens: Sequence[int], extra_key: object) -> list[Key]:
        """The keys of the full blocks of a prompt; none without caching."""
        if not self.caching:
            return []
        size = self.block_size
        parent = self.root(extra_key)
        keys = []
        for start in range(0, len(tokens) - size + 1, size):
            key = (parent, tuple(tokens[start : start + size]))
            keys.append(key)
            parent = hash(key)
        return keys

    def root(self, extra_key: object) -> int:
        """What stands before the first block. `repr` tells 1, True, 1.0 and "1" apart."""
        return hash(("root", repr(extra_key)))

    def _num_computed(self, num_tokens: int, found: Sequence[ModelBlock | None]) -> int:
        """Blocks that a prompt can skip; one token is always left."""
        limit = (num_tokens - 1) // self.block_size
        count = 0
        while count < min(limit, len(found)) and found[count] and found[count].computed:
            count += 1
        return count

    def find_cached_prefix(self, tokens: Sequence[int], extra_key: object = None) -> list[int]:
        """The ids of the longest run of cached, computed blocks from the start."""
        found = list(map(self.pools[GPU].index.get, self._keys(tokens, extra_key)))
        return [block.block_id for block in found[: self._num_computed(len(tokens), found)]]

    def can_allocate(
        self, tokens: Sequence[int], extra_key: object = None, num_lookahead_slots: int = 0
    ) -> str:
        """Return "ok", "later" or "never"."""
        pool = self.pools[GPU]
        required = -(-(len(tokens) + num_lookahead_slots) // self.block_size)
        found = map(pool.index.get, self._keys(tokens, extra_key))
        in_use = sum(1 for block in found if block and block.refs)
        return self._answer(required, required - in_use)

    def _answer(self, required: int, required_now: int) -> str:
        pool = self.pools[GPU]
        if pool.total - required < self.watermark_blocks:
            return "never"
        return "ok" if pool.num_free - required_now >= self.watermark_blocks else "later"

    def allocate(
        self,
        seq_ids: Sequence[object],
        tokens: Sequence[int],
        extra_key: object = None,
        num_lookahead_slots: int = 0,
    ) -> None:
        """Take the blocks of a prompt for one sequence; the other sequences share them."""
        pool, size = self.pools[GPU], self.block_size
        keys = self._keys(tokens, extra_key)
        found = list(map(pool.index.get, keys))
        total = -(-(len(tokens) + num_lookahead_slots) // size)
        pool.require(total - sum(1 for block in found if block and block.refs))
        num_cached_tokens = self._num_computed(len(tokens), found) * size
        hits = [block for block in found if block]
        pool.stats.lookups += len(keys)
        pool.stats.hits += len(hits)
        for block in hits:
            pool.reference(block)
        pool.operation += 1
        blocks: list[ModelBlock | None] = []
        for i in range(total):
            block = found[i] if i < len(found) else None
            if block is None:
                block = pool.take(i, list(tokens[i * size : (i + 1) * size]))
                if i < len(keys):
                    block.key = keys[i]
                    block.in_prefill = True
                    pool.register(block)
            blocks.append(block)
        table = ModelTable(self.root(extra_key), GPU, blocks, len(tokens), num_cached_tokens)
        self.tables[seq_ids[0]] = table
        if len(seq_ids) > 1:
            self.fork(seq_ids[0], seq_ids[1:])

    # -- growth

    def num_taken_by_append(
        self, rows: Iterable[tuple[object, int]], num_lookahead_slots: int = 0
    ) -> int:
        """New blocks and copies that appending these many tokens to each would take."""
        size = self.block_size
        taken = 0
        written: dict[int, int] = {}
        for seq_id, count in rows:
            table = self.tables[seq_id]
            present = len(table.blocks)
            taken += max(0, -(-(table.length + count + num_lookahead_slots) // size) - present)
            for i in range(table.length // size, present):
                if i * size >= table.length + count or not count:
                    break
                block = table.blocks[i]
                if block.refs - written.get(id(block), 0) > 1:
                    written[id(block)] = written.get(id(block), 0) + 1
                    taken += 1
        return taken

    def can_append(self, rows: Iterable[tuple[object, int]], num_lookahead_slots: int = 0) -> bool:
        """Whether `append` would succeed. The watermark doesn't count."""
        return self.num_taken_by_append(rows, num_lookahead_slots) <= self.pools[GPU].num_free

    def append(
        self,
        rows: Sequence[tuple[object, Sequence[int]]],
        num_lookahead_slots: int = 0,
        num_computed: Sequence[int] | None = None,
    ) -> list[Pair]:
        """Append tokens to each of distinct sequences and return the copies to make.

        With a sliding window, `num_computed` says what each has computed.
        """
        pool, size = self.pools[GPU], self.block_size
        pool.require(self.num_taken_by_append(((s, len(t)) for s, t in rows), num_lookahead_slots))
        for seq_id, tokens in rows:
            self._take_slots(self.tables[seq_id], len(tokens), num_lookahead_slots)
        filled: list[list[tuple[ModelTable, int]]] = []
        for seq_id, tokens in rows:
            table = self.tables[seq_id]
            layer = 0
            for token in tokens:
                i, offset = divmod(table.length, size)
                table.blocks[i].tokens.append(token)
                table.length += 1
                if offset == size - 1 and self.caching:
                    if layer == len(filled):
                        filled.append([])
                    filled[layer].append((table, i))
                    layer += 1
        for entries in filled:
            pool.operation += 1
            for table, i in entries:
                self._fill(table, i)
        if self.window_blocks is not None and num_computed is not None:
            for (seq_id, _), computed in zip(rows, num_computed, strict=True):
                self._drop_before_window(self.tables[seq_id], computed)
        copies = [(source, target) for target, source in pool.copies.items()]
        pool.copies.clear()
        return copies

    def _take_slots(self, table: ModelTable, count: int, num_lookahead_slots: int) -> None:
        """Copy the shared blocks that will be written and take the missing ones."""
        pool, size, blocks = self.pools[GPU], self.block_size, table.blocks
        end = table.length + count
        for i in range(table.length // size, -(-(end + num_lookahead_slots) // size)):
            if i == len(blocks):
                blocks.append(pool.take(i, []))
            elif count and i * size < end and blocks[i].refs > 1:
                old = blocks[i]
                blocks[i] = pool.take(i, list(old.tokens))
                blocks[i].last_accessed = old.last_accessed
                old.refs -= 1
                pool.record_copy(old, blocks[i])
                pool.stats.copies += 1

    def _fill(self, table: ModelTable, i: int) -> None:
        """Register a block that has filled, or take the cached one with its content."""
        pool = self.pools[GPU]
        own = table.blocks[i]
        parent = hash(table.blocks[i - 1].key) if i else table.root
        own.key = (parent, tuple(own.tokens))
        cached = pool.index.get(own.key)
        if cached is None:
            pool.register(own)
            return
        if cached.in_prefill:
            pool.record_copy(own, cached)
        pool.reference(cached)
        pool.release(own)
        pool.stats.promotions += 1
        table.blocks[i] = cached

    def _drop_before_window(self, table: ModelTable, num_computed: int) -> None:
        """Give up blocks whose last token no query from `num_computed` on sees.

        The window is known in blocks, rounded up: keys before `first` are outside it.
        """
        pool, size = self.pools[GPU], self.block_size
        num_computed = min(num_computed, table.length)
        first = num_computed + 2 - self.window_blocks * size
        end = min(max(first, 0) // size, len(table.blocks))
        for i in reversed(range(table.num_null, end)):
            pool.release(table.blocks[i])
            table.blocks[i] = None
        table.num_null = max(end, table.num_null)

    def fork(self, parent: object, children: Sequence[object]) -> None:
        """Let the children share all blocks of the parent."""
        table = self.tables[parent]
        for block in table.blocks[table.num_null :]:
            block.refs += len(children)
        for child in children:
            self.tables[child] = ModelTable(
                table.root,
                table.device,
                table.blocks.copy(),
                table.length,
                table.num_cached_tokens,
                table.num_null,
            )

    def free(self, seq_ids: Sequence[object]) -> None:
        """Give up the blocks of distinct sequences."""
        for seq_id in reversed(seq_ids):
            table = self.tables.pop(seq_id)
            pool = self.pools[table.device]
            for block in reversed(table.blocks[table.num_null :]):
                pool.release(block)

    # -- swap

    def _owned(self, seq_ids: Iterable[object]) -> list[ModelBlock]:
        """Every reference of these sequences, in order."""
        owned = []
        for seq_id in seq_ids:
            table = self.tables[seq_id]
            owned.extend(table.blocks[table.num_null :])
        return owned

    def _there(self, block: ModelBlock, target: ModelPool) -> ModelBlock | None:
        """The computed block of the other device with this content."""
        if len(block.tokens) < self.block_size:
            return None
        other = target.index.get(block.key)
        return other if other and other.computed else None

    def num_taken_by_swap(self, seq_ids: Iterable[object], device: int) -> int:
        """What moving these sequences would take off the free count of `device`."""
        target = self.pools[device]
        distinct = dict.fromkeys(self._owned(seq_ids))
        there = {block: self._there(block, target) for block in distinct}
        revived = {other for other in there.values() if other and not other.refs}
        return sum(1 for other in there.values() if other is None) + len(revived)

    def can_swap_out(self, seq_ids: Sequence[object]) -> bool:
        """Whether the CPU has room for these sequences, all on the GPU."""
        return self.num_taken_by_swap(seq_ids, CPU) <= self.pools[CPU].num_free

    def can_swap_in(self, rows: Sequence[tuple[object, int]], num_lookahead_slots: int = 0) -> str:
        """Whether these sequences fit on the GPU and can grow by these many tokens there."""
        seq_ids = [seq_id for seq_id, _ in rows]
        growth = self.num_taken_by_append(rows, num_lookahead_slots)
        moved = len(dict.fromkeys(self._owned(seq_ids)))
        return self._answer(moved + growth, self.num_taken_by_swap(seq_ids, GPU) + growth)

    def swap(self, seq_ids: Sequence[object], device: int) -> list[Pair]:
        """Move these sequences to `device`; what they share stays shared. Return what to copy."""
        source, target = self.pools[1 - device], self.pools[device]
        target.require(self.num_taken_by_swap(seq_ids, device))
        owned = self._owned(seq_ids)
        count: dict[ModelBlock, int] = {}
        for block in owned:
            count[block] = count.get(block, 0) + 1
        moved: dict[ModelBlock, ModelBlock] = {}
        for block, refs in count.items():
            other = self._there(block, target)
            if other is not None:
                target.reference(other, refs)
                moved[block] = other
        pairs = []
        target.operation += 1
        for block, refs in count.items():
            if block in moved:
                continue
            new = moved[block] = target.take(block.depth, list(block.tokens))
            new.refs = refs
            new.key = block.key
            new.computed, new.in_prefill = block.computed, block.in_prefill
            new.last_accessed = block.last_accessed
            if self.caching and len(new.tokens) == self.block_size:
                target.register(new)
            pairs.append((block.block_id, new.block_id))
        for block in reversed(owned):
            source.release(block)
        for seq_id in seq_ids:
            table = self.tables[seq_id]
            table.device = device
            table.blocks[table.num_null :] = [
                moved[block] for block in table.blocks[table.num_null :]
            ]
        return pairs

    def swap_out(self, seq_ids: Sequence[object]) -> list[Pair]:
        """Move to the CPU."""
        return self.swap(seq_ids, CPU)

    def swap_in(self, seq_ids: Sequence[object]) -> list[Pair]:
        """Move to the GPU."""
        return self.swap(seq_ids, GPU)

    # -- marks and answers

    def mark_computed(self, seq_ids: Iterable[object], num_tokens: int | None = None) -> None:
        """The KV of the first tokens of these sequences was written."""
        for seq_id in seq_ids:
            table = self.tables[seq_id]
            end = table.length if num_tokens is None else min(table.length, num_tokens)
            for block in table.blocks[table.num_null : end // self.block_size]:
                block.computed, block.in_prefill = True, False

    def access(self, seq_id: object, now: float) -> None:
        """Set the time of the last access of a sequence's blocks."""
        table = self.tables[seq_id]
        for block in table.blocks[table.num_null :]:
            block.last_accessed = now

    def reset(self, device: int) -> bool:
        """Forget all cached content if no block is in use."""
        pool = self.pools[device]
        if pool.num_free != pool.total:
            return False
        pool.clear()
        return True

    def block_table(self, seq_id: object) -> list[int]:
        """The ids of a sequence's blocks; the null block is 0 on the GPU and -1 on the CPU."""
        table = self.tables[seq_id]
        null_id = 0 if table.device == GPU else -1
        return [block.block_id if block else null_id for block in table.blocks]

    def common_computed(self, seq_ids: Sequence[object]) -> list[int]:
        """The ids of the computed blocks that these sequences all start with."""
        common: list[int] = []
        if not self.caching:
            return common
        for blocks in zip(*(self.tables[seq_id].blocks for seq_id in seq_ids), strict=False):
            if any(block is not blocks[0] for block in blocks) or not blocks[0].computed:
                break
            common.append(blocks[0].block_id)
        return common

    def check(self) -> None:
        """Every block is free, evictable or in use, and counted as often as it is referenced."""
        for device, pool in enumerate(self.pools):
            owners: dict[ModelBlock, int] = {}
            for table in self.tables.values():
                if table.device == device:
                    for block in table.blocks[table.num_null :]:
                        owners[block] = owners.get(block, 0) + 1
            assert all(block.refs == count for block, count in owners.items())
            ids = [block.block_id for block in owners]
            ids += [*pool.recycled, *pool.evictable, *range(pool.next_fresh, pool.num_blocks)]
            assert sorted(ids) == list(range(pool.first_id, pool.num_blocks))
