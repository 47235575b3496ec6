"""Looking prompts up: hashing their blocks, matching cached prefixes, gathering what was found."""

import functools
from typing import Any

import numpy as np
import torch

from cache.content_hash import ContentHasher
from cache.prefix_caching import PrefixCachingBlockAllocator
from kernels.prefix_hash import DevicePrefixIndex, make_hash_keys
from kernels.testing import is_poison, poison_, poisoned

from ..config import HashConfig, MatchConfig, MatchGatherConfig
from .operation import Cost, Operation, as_bits, block_bytes, limited, require, spread, torch_dtype

NUM_CHECKED_PROMPTS = 16


class HashBlocks(Operation[HashConfig]):
    """
    Attributes:
        prompts: the token ids on the host, int32 [num_prompts, prompt_len].
        hasher: the host's; its seed is the configured one.
        token_ids, seq_lens, roots, hash_keys: the arguments of the kernel, on the device.
        out: int64 [num_prompts, num_blocks], written.
    """

    kind = "hash_blocks"

    def __init__(
        self, config: HashConfig | MatchGatherConfig, device: torch.device, seed: int
    ) -> None:
        super().__init__(config, device, seed)
        shape = (config.num_prompts, config.prompt_len)
        self.prompts = np.random.default_rng(seed).integers(0, 128_000, shape, dtype=np.int32)
        self.hasher = ContentHasher(config.block_size, seed)
        self.token_ids = torch.from_numpy(self.prompts).to(device)
        self.seq_lens = torch.full(shape[:1], shape[1], dtype=torch.int32, device=device)
        self.roots = torch.full(shape[:1], int(self.hasher.root()), device=device)
        self.hash_keys = make_hash_keys(
            self.hasher.word_keys,
            self.hasher.word_multipliers,
            self.hasher.position_multiplier,
            device,
        )
        width = config.prompt_len // config.block_size
        self.out = poisoned(config.num_prompts, width, dtype=torch.int64, device=device)

    @classmethod
    def cost(cls, config: HashConfig) -> Cost:
        num_blocks = config.num_prompts * (config.prompt_len // config.block_size)
        return Cost(
            bytes_read=4 * num_blocks * config.block_size + 12 * config.num_prompts,
            bytes_written=8 * num_blocks,
            unit="prompts",
            num_units=config.num_prompts,
        )

    @classmethod
    def reduced(cls, config: HashConfig, *, to_compile: bool = False) -> HashConfig:
        return limited(config, num_prompts=2, prompt_len=4096)

    def poison(self) -> None:
        poison_(self.out)

    def check(self, answer: Any) -> None:
        """Some prompts' hashes against the host's."""
        width = self.config.prompt_len // self.config.block_size
        require(answer.shape == (len(self.prompts), width), f"shape {tuple(answer.shape)}")
        for row in spread(len(self.prompts), NUM_CHECKED_PROMPTS):
            blocks = self.prompts[row, : width * self.config.block_size]
            blocks = blocks.reshape(width, self.config.block_size)
            wanted = self.hasher.hash_chain(blocks, self.hasher.root())
            found = torch.as_tensor(answer[row]).cpu().numpy()
            require(bool(np.array_equal(found, wanted)), f"a hash of prompt {row} differs")


class MatchPrefix(HashBlocks):
    """
    Attributes:
        allocator: the host's, in which the first `cached_len` tokens of each prompt are cached.
        cached: each prompt's cached blocks, int32 [num_prompts, num_cached].
        index: the device's copy of the allocator's index.
        block_tables, matched_lens: written.
    """

    kind = "match_prefix"

    def __init__(
        self, config: MatchConfig | MatchGatherConfig, device: torch.device, seed: int
    ) -> None:
        super().__init__(config, device, seed)
        num_cached = config.cached_len // config.block_size
        self.num_blocks = max(1, config.num_prompts * num_cached)
        self.allocator = PrefixCachingBlockAllocator(
            self.num_blocks, config.block_size, hasher=self.hasher, track_index_changes=True
        )
        self.cached = np.stack([self._cache(prompt, num_cached) for prompt in self.prompts])
        width = (config.prompt_len - 1) // config.block_size
        self.block_tables = poisoned(config.num_prompts, width, dtype=torch.int32, device=device)
        self.matched_lens = poisoned(config.num_prompts, dtype=torch.int32, device=device)

    def _cache(self, prompt: np.ndarray, num_cached: int) -> np.ndarray:
        length = num_cached * self.config.block_size
        plan = self.allocator.plan(prompt[:length], length, self.hasher.root())
        block_ids = self.allocator.allocate_sequence(prompt[:length], plan)
        self.allocator.mark_computed(block_ids)
        return block_ids

    @functools.cached_property
    def index(self) -> DevicePrefixIndex:
        """Made when first asked for: the host needs none."""
        host, pool = self.allocator.index, self.allocator.pool
        index = DevicePrefixIndex(
            host.num_buckets, self.num_blocks, self.config.block_size, self.device
        )
        changes = host.drain_changes()
        block_ids = changes.block_ids
        index.apply_changes(*changes, pool.token_ids[block_ids], pool.computed[block_ids])
        return index

    @classmethod
    def cost(cls, config: MatchConfig | MatchGatherConfig) -> Cost:
        """The tokens of each cached block and of the one after it, where the run breaks.

        Of each cached one also an entry of the index and what it holds. Written are the block
        tables and the matched lengths.
        """
        width = (config.prompt_len - 1) // config.block_size
        num_cached = config.cached_len // config.block_size
        token_bytes = 4 * config.block_size
        num_read = min(num_cached + 1, width)
        read = num_read * token_bytes + num_cached * (8 + 4 + 1 + token_bytes)
        return Cost(
            bytes_read=config.num_prompts * (read + 12),
            bytes_written=config.num_prompts * (4 * width + 4),
            unit="prompts",
            num_units=config.num_prompts,
        )

    @classmethod
    def reduced(cls, config: MatchConfig, *, to_compile: bool = False) -> MatchConfig:
        return limited(config, num_prompts=2, prompt_len=4096, cached_len=3072)

    def poison(self) -> None:
        poison_(self.block_tables)
        poison_(self.matched_lens)

    def check(self, answer: Any) -> None:
        """Every prompt's blocks, from (block_tables, matched_lens) or an array a prompt."""
        num_cached = self.cached.shape[1]
        if isinstance(answer, list):
            require(len(answer) == len(self.cached), f"{len(answer)} prompts")
            for row, found in enumerate(answer):
                require(bool(np.array_equal(found, self.cached[row])), f"prompt {row} differs")
            return
        block_tables, matched_lens = answer[:2]
        tables = block_tables.cpu().numpy()
        lengths_ = matched_lens.cpu().numpy()
        require(bool((lengths_ == num_cached * self.config.block_size).all()), "a length differs")
        require(bool(np.array_equal(tables[:, :num_cached], self.cached)), "a block differs")
        require(bool((tables[:, num_cached:] == -1).all()), "a row goes on after its match")


class PrefixHashGather(MatchPrefix):
    """
    Attributes:
        caches: [num_blocks, block_size, num_kv_heads, head_size], keys and values of all layers.
        gathered: [num_prompts, max_blocks * block_size, num_kv_heads, head_size] each, written.
    """

    kind = "prefix_hash_gather"

    def __init__(self, config: MatchGatherConfig, device: torch.device, seed: int) -> None:
        super().__init__(config, device, seed)
        heads = (config.num_kv_heads, config.head_size)
        dtype = torch_dtype(config.dtype)
        shape = (self.num_blocks, config.block_size, *heads)
        self.caches = [self.randn(*shape, dtype=dtype) for _ in range(2 * config.num_layers)]
        tokens = self.block_tables.shape[1] * config.block_size
        self.gathered = [
            poisoned(config.num_prompts, tokens, *heads, dtype=dtype, device=device)
            for _ in self.caches
        ]

    @classmethod
    def cost(cls, config: MatchGatherConfig) -> Cost:
        """A match, and each matched block of each layer read and written."""
        match = super().cost(config)
        num_blocks = config.num_prompts * (config.cached_len // config.block_size)
        moved = 2 * config.num_layers * num_blocks * block_bytes(config)
        return Cost(
            match.bytes_read + moved,
            match.bytes_written + moved,
            unit="prompts",
            num_units=config.num_prompts,
        )

    @classmethod
    def reduced(cls, config: MatchGatherConfig, *, to_compile: bool = False) -> MatchGatherConfig:
        return limited(config, num_prompts=2, prompt_len=1024, cached_len=768, num_layers=1)

    def poison(self) -> None:
        super().poison()
        for tensor in self.gathered:
            poison_(tensor)

    def check(self, answer: Any) -> None:
        """The match, and every gathered block, bit for bit, with nothing behind the last one."""
        super().check(answer)
        num_cached = self.cached.shape[1]
        rows = torch.from_numpy(self.cached).long().to(self.device)
        for index, (cache, gathered) in enumerate(zip(self.caches, answer[2], strict=True)):
            found = gathered.unflatten(1, (-1, self.config.block_size))[:, :num_cached]
            wanted = cache[rows]
            behind = gathered[:, num_cached * self.config.block_size :]
            require(is_poison(behind).all(), f"tensor {index} is written behind a match")
            require(
                torch.equal(as_bits(found), as_bits(wanted)), f"a block of tensor {index} differs"
            )
