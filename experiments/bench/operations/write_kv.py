"""Writing new keys and values to scattered slots of the cache."""

from typing import Any

import torch

from kernels import reference
from kernels.launch import cdiv
from kernels.testing import poison_, poisoned

from ..config import WriteConfig
from .operation import Cost, Operation, as_bits, cache_torch_dtype, limited, require, torch_dtype


class WriteKV(Operation[WriteConfig]):
    """
    Attributes:
        key, value: [num_tokens, num_kv_heads, head_size].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size], written; twice as
            many slots as tokens.
        slot_mapping: int64 [num_tokens], distinct and in random order.
        k_scale, v_scale: None, or the number that an fp8 cache is scaled by.
    """

    kind = "write_kv"

    def __init__(self, config: WriteConfig, device: torch.device, seed: int) -> None:
        super().__init__(config, device, seed)
        heads = (config.num_kv_heads, config.head_size)
        dtype = torch_dtype(config.dtype)
        self.key = self.randn(config.num_tokens, *heads, dtype=dtype)
        self.value = self.randn(config.num_tokens, *heads, dtype=dtype)
        num_blocks = cdiv(2 * config.num_tokens, config.block_size)
        cache_dtype = cache_torch_dtype(config.cache_dtype, config.dtype)
        shape = (num_blocks, config.block_size, *heads)
        self.key_cache = poisoned(*shape, dtype=cache_dtype, device=device)
        self.value_cache = poisoned(*shape, dtype=cache_dtype, device=device)
        self.slot_mapping = self.shuffled(num_blocks * config.block_size)[: config.num_tokens]
        self.k_scale = self.v_scale = None if cache_dtype == dtype else 0.5

    @classmethod
    def cost(cls, config: WriteConfig) -> Cost:
        elements = 2 * config.num_tokens * config.num_kv_heads * config.head_size
        cache_dtype = cache_torch_dtype(config.cache_dtype, config.dtype)
        return Cost(
            bytes_read=elements * torch_dtype(config.dtype).itemsize + 8 * config.num_tokens,
            bytes_written=elements * cache_dtype.itemsize,
            unit="tokens",
            num_units=config.num_tokens,
        )

    @classmethod
    def reduced(cls, config: WriteConfig, *, to_compile: bool = False) -> WriteConfig:
        return limited(config, num_tokens=8)

    def poison(self) -> None:
        poison_(self.key_cache)
        poison_(self.value_cache)

    def check(self, answer: Any) -> None:
        """Both caches, bit for bit: the written slots, and that no other one was."""
        del answer
        for name, new, cache, scale in (
            ("key", self.key, self.key_cache, self.k_scale),
            ("value", self.value, self.value_cache, self.v_scale),
        ):
            slots = as_bits(cache.view(-1, *cache.shape[2:]))
            wanted = as_bits(reference.quantized(new, scale, cache.dtype))
            require(torch.equal(slots[self.slot_mapping], wanted), f"a {name} differs")
            others = torch.ones(len(slots), dtype=torch.bool, device=self.device)
            others[self.slot_mapping] = False
            poison = as_bits(poisoned(*cache.shape[2:], dtype=cache.dtype, device=self.device))
            require((slots[others] == poison).all(), f"a {name} was written elsewhere")
