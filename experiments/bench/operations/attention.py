"""Attention of the newest tokens over a paged cache: decode, prefill, and all between."""

from typing import Any

import torch

from kernels import reference
from kernels.launch import cdiv
from kernels.testing import assert_within_budget, poison_, poisoned

from ...visible import visible_pairs
from ..config import AttentionConfig, DecodeConfig, PrefillConfig
from .operation import (
    Cost,
    Operation,
    WrongAnswerError,
    cache_torch_dtype,
    limited,
    require,
    spread,
    torch_dtype,
)

NUM_CHECKED_SEQS = 4
NUM_CHECKED_SPANS = 3
CHECKED_SPAN = 64  # query tokens
ERROR_FACTOR = 3.0
"""How much larger than the eager low-precision error an implementation's may be."""


class Attention(Operation[AttentionConfig]):
    """One ragged batch of sequences of equal lengths, each block at a random place in the cache.

    Attributes:
        query: [num_tokens, num_heads, head_size].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size].
        block_tables: int32 [batch_size, max_blocks].
        seq_lens: int32 [batch_size]. query_start_loc: int32 [batch_size + 1].
        seq_len, query_len: tokens of each sequence, and those of them that are queries.
        out: [num_tokens, num_heads, head_size], for implementations that write where told.
        scale: of the dot products.
    """

    kind = "attention"

    def __init__(self, config: AttentionConfig, device: torch.device, seed: int) -> None:
        super().__init__(config, device, seed)
        self.seq_len, self.query_len = lengths(config)
        batch, block_size = config.batch_size, config.block_size
        blocks_each = cdiv(self.seq_len, block_size)
        shape = (batch * blocks_each, block_size, config.num_kv_heads, config.head_size)
        cache_dtype = cache_torch_dtype(config.cache_dtype, config.dtype)
        self.key_cache = self.randn(*shape, dtype=cache_dtype)
        self.value_cache = self.randn(*shape, dtype=cache_dtype)
        self.block_tables = self.shuffled(shape[0]).view(batch, blocks_each).int()
        self.seq_lens = torch.full((batch,), self.seq_len, dtype=torch.int32, device=device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.query_start_loc = starts * self.query_len
        dtype = torch_dtype(config.dtype)
        query_shape = (batch * self.query_len, config.num_heads, config.head_size)
        self.query = self.randn(*query_shape, dtype=dtype)
        self.out = poisoned(*query_shape, dtype=dtype, device=device)
        self.scale = config.head_size**-0.5
        self._known: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def cost(cls, config: AttentionConfig) -> Cost:
        """Visible keys and values once a sequence, the queries, the block tables, the output."""
        seq_len, query_len = lengths(config)
        window = config.sliding_window or seq_len
        first = seq_len - query_len
        pairs = int(visible_pairs(seq_len, window) - visible_pairs(first, window))
        num_read = min(seq_len, query_len + window - 1)
        itemsize = torch_dtype(config.dtype).itemsize
        cache_itemsize = cache_torch_dtype(config.cache_dtype, config.dtype).itemsize
        query_bytes = query_len * config.num_heads * config.head_size * itemsize
        kv_bytes = 2 * num_read * config.num_kv_heads * config.head_size * cache_itemsize
        table_bytes = 4 * cdiv(num_read, config.block_size)
        return Cost(
            bytes_read=config.batch_size * (kv_bytes + query_bytes + table_bytes),
            bytes_written=config.batch_size * query_bytes,
            flops=config.batch_size * 4 * config.num_heads * config.head_size * pairs,
            unit="tokens",
            num_units=config.batch_size * query_len,
        )

    @classmethod
    def reduced(cls, config: AttentionConfig, *, to_compile: bool = False) -> AttentionConfig:
        config = limited(config, batch_size=2)
        if config.num_splits is not None:
            config = limited(config, num_splits=4)
        if isinstance(config, DecodeConfig):
            return limited(config, context_len=max(200, 2 * config.block_size + 7))
        # A program's share of queries, so that no key is read twice; more than that to compile.
        share = max(1, (config.tile.m or 64) * config.num_kv_heads // config.num_heads)
        query_len = min(lengths(config)[1], 512 if to_compile else share)
        cached_len = min(config.cached_len, 130)
        return limited(config, prompt_len=cached_len + query_len, cached_len=cached_len)

    def poison(self) -> None:
        poison_(self.out)

    def check(self, answer: Any) -> None:
        """Some rows of some sequences against float64, and all of them for NaN and infinity."""
        require(answer.shape == self.query.shape, f"shape {list(answer.shape)}")
        require(answer.isfinite().all(), "NaN or infinity in the output")
        spans = cdiv(self.query_len, CHECKED_SPAN)
        for seq in spread(self.config.batch_size, NUM_CHECKED_SEQS):
            for span in spread(spans, NUM_CHECKED_SPANS):
                start = span * CHECKED_SPAN
                end = min(start + CHECKED_SPAN, self.query_len)
                first = seq * self.query_len
                rows = answer[first + start : first + end]
                try:
                    assert_within_budget(rows, *self._expected(seq, start, end), ERROR_FACTOR)
                except AssertionError as error:
                    where = f"sequence {seq}, queries {start} to {end - 1}"
                    raise WrongAnswerError(f"{where}: {error}") from None

    def _expected(self, seq: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(float64, low precision) results of some of a sequence's queries; computed once."""
        if (seq, start) not in self._known:
            self._known[seq, start] = self._reference(seq, start, end)
        return self._known[seq, start]

    def _reference(self, seq: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        seq_len = self.seq_len - self.query_len + end
        blocks = self.block_tables[seq, : cdiv(seq_len, self.config.block_size)].cpu()
        first = seq * self.query_len
        tensors = (
            self.query[first + start : first + end],
            # Not all of the caches: as float64 they may not fit.
            *reference.gather_blocks([self.key_cache, self.value_cache], blocks),
        )
        tables = (
            torch.arange(len(blocks), dtype=torch.int32, device=self.device)[None],
            torch.tensor([seq_len], dtype=torch.int32, device=self.device),
            torch.tensor([0, end - start], dtype=torch.int32, device=self.device),
        )
        options = {"scale": self.scale, "sliding_window": self.config.sliding_window}
        exact = reference.paged_attention(*(t.double() for t in tensors), *tables, **options)
        return exact, reference.paged_attention(*tensors, *tables, **options)


def lengths(config: AttentionConfig) -> tuple[int, int]:
    """(tokens of each sequence, those of them that are queries)."""
    if isinstance(config, DecodeConfig):
        return config.context_len, 1
    assert isinstance(config, PrefillConfig)
    return config.prompt_len, config.prompt_len - config.cached_len


def split_bytes(config: AttentionConfig, num_splits: int) -> int:
    """The bytes that partial results of split keys take on their way: written once, read once."""
    if num_splits == 1:
        return 0
    rows = config.batch_size * lengths(config)[1] * config.num_heads
    return 2 * 4 * num_splits * rows * (config.head_size + 1)
