"""What one would write in plain torch: SDPA over gathered KV, and indexing for what moves."""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from kernels import reference

from ..operations.attention import Attention
from ..operations.block_moves import CopyBlocks, GatherBlocks, SwapBlocks
from ..operations.merge_states import MergeStates
from ..operations.prefix_hash import HashBlocks
from ..operations.write_kv import WriteKV
from .implementation import Call, Implementation


def attention(op: Attention) -> Call:
    """Gathers the blocks that any query sees, then SDPA; both are timed, only masks are made once.

    The fused kernel that shares KV heads among query heads takes neither fp32 nor a mask, so for
    these each KV head is repeated.
    """
    config = op.config
    batch, block_size, head_size = config.batch_size, config.block_size, config.head_size
    first_key = 0
    if config.sliding_window is not None:
        first_key = max(0, op.seq_len - op.query_len - config.sliding_window + 1)
    first_block = first_key // block_size
    num_keys = op.seq_len - first_key
    blocks = op.block_tables[:, first_block:].flatten()
    start = first_key - first_block * block_size
    query = op.query.view(batch, op.query_len, -1, head_size).transpose(1, 2)
    hides = config.sliding_window is not None and config.sliding_window < op.seq_len
    needs_mask = op.query_len > 1 and (
        hides or (op.query_len < op.seq_len and query.dtype == torch.float32)
    )
    options = _masking(op, num_keys) if needs_mask else _causal(op)
    group = config.num_heads // config.num_kv_heads
    shares_heads = query.dtype != torch.float32 and not needs_mask

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        """[batch_size, heads, num_keys, head_size], of the query's dtype."""
        tokens = _indexable(cache).index_select(0, blocks).view(cache.dtype)
        tokens = tokens.view(batch, -1, config.num_kv_heads, head_size)
        tokens = tokens[:, start : start + num_keys].to(query.dtype).transpose(1, 2)
        return tokens if shares_heads else tokens.repeat_interleave(group, dim=1)

    def call() -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            query,
            gathered(op.key_cache),
            gathered(op.value_cache),
            scale=op.scale,
            enable_gqa=shares_heads,
            **options,
        )
        return out.transpose(1, 2).reshape(op.query.shape)

    return call


def _causal(op: Attention) -> dict[str, object]:
    """What tells SDPA to hide later keys, without a mask in memory."""
    if op.query_len == 1:
        return {}
    if op.query_len == op.seq_len:
        return {"is_causal": True}
    return {"attn_mask": causal_lower_right(op.query_len, op.seq_len)}


def _masking(op: Attention, num_keys: int) -> dict[str, object]:
    """A mask of the last `num_keys` keys, bool [query_len, num_keys]."""
    key = torch.arange(op.seq_len - num_keys, op.seq_len, device=op.device)
    query = torch.arange(op.seq_len - op.query_len, op.seq_len, device=op.device)[:, None]
    visible = key <= query
    if op.config.sliding_window is not None:
        visible &= key > query - op.config.sliding_window
    return {"attn_mask": visible}


def merge(op: MergeStates) -> Call:
    def call() -> tuple[torch.Tensor, torch.Tensor]:
        weights = op.lses.softmax(0)[..., None]
        return (op.outs * weights).sum(0).to(op.outs.dtype), op.lses.logsumexp(0)

    return call


def write(op: WriteKV) -> Call:
    targets = [
        (new, _indexable(cache.view(-1, *cache.shape[2:])), cache.dtype, scale)
        for new, cache, scale in (
            (op.key, op.key_cache, op.k_scale),
            (op.value, op.value_cache, op.v_scale),
        )
    ]

    def call() -> None:
        for new, slots, dtype, scale in targets:
            if scale is not None:
                limit = torch.finfo(dtype).max
                new = (new.float() / scale).clamp(-limit, limit).to(dtype)
            slots[op.slot_mapping] = _indexable(new)

    return call


def copy(op: CopyBlocks) -> Call:
    sources, destinations = op.pairs.t().contiguous()

    def call() -> None:
        for cache in op.sources:
            cache.index_copy_(0, destinations, cache.index_select(0, sources))

    return call


def gather(op: GatherBlocks) -> Call:
    blocks = op.pairs[:, 0].contiguous()

    def call() -> None:
        for cache, gathered in zip(op.sources, op.destinations, strict=True):
            torch.index_select(cache, 0, blocks, out=gathered)

    return call


def swap(op: SwapBlocks) -> Call:
    """A copy of its own for each block of each tensor, as the link takes no scattered ones."""
    pairs = op.pairs.tolist()

    def call() -> None:
        for source, destination in zip(op.sources, op.destinations, strict=True):
            for from_block, to_block in pairs:
                destination[to_block].copy_(source[from_block], non_blocking=True)

    return call


def hashes(op: HashBlocks) -> Call:
    prompts = (op.token_ids, op.seq_lens, op.roots, op.hash_keys)
    return lambda: reference.hash_blocks(*prompts, op.config.block_size, out=op.out)


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; fp8, which not every index kernel takes, as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


IMPLEMENTATION = Implementation(
    "torch_ops",
    {
        "attention": attention,
        "merge_states": merge,
        "write_kv": write,
        "copy_blocks": copy,
        "gather_blocks": gather,
        "swap_blocks": swap,
        "hash_blocks": hashes,
    },
)
