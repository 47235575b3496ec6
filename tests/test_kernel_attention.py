"""Paged attention against its definition, on poisoned memory, over every shape that is promised."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import launch
from kernels.paged_attention import paged_attention
from kernels.testing import (
    AttentionInputs,
    attention_inputs,
    check_attention,
    guarded,
    poison_unread_slots_,
    poisoned,
    traffic_meter,
)

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

HEADS = ((1, 1), (4, 4), (8, 2), (5, 1), (24, 8), (64, 8))
HEAD_SIZES = (16, 64, 80, 96, 128, 192, 256, 576)
BLOCK_SIZES = (1, 8, 12, 16, 48, 128, 544)
QUERIES = (1, 2, 17, "full")
GRID_DTYPES = ("fp32", "fp16", "bf16") if HAS_GPU else ("fp32", "fp16")


def pairwise(*axes: tuple) -> list[tuple]:
    """Rows in which every two values of different axes meet, fewest first by a greedy choice."""
    pairs = list(itertools.combinations(range(len(axes)), 2))
    missing = {(i, a, j, b) for i, j in pairs for a in axes[i] for b in axes[j]}
    rows = []
    while missing:
        i, a, j, b = min(missing, key=str)
        candidates = itertools.product(
            *[[a] if k == i else [b] if k == j else v for k, v in enumerate(axes)]
        )
        row = max(candidates, key=lambda r: sum((i, r[i], j, r[j]) in missing for i, j in pairs))
        missing -= {(i, row[i], j, row[j]) for i, j in pairs}
        rows.append(row)
    return rows


def row_id(row: tuple) -> str:
    (num_heads, num_kv_heads), head_size, block_size, query_len, dtype = row
    return f"h{num_heads}x{num_kv_heads}-d{head_size}-bs{block_size}-q{query_len}-{dtype}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inputs_of(seq_lens: list[int], query_lens: list[int], **options: object) -> AttentionInputs:
    return attention_inputs(seq_lens, query_lens, device=DEVICE, **options)


@pytest.mark.parametrize(
    "row", pairwise(HEADS, HEAD_SIZES, BLOCK_SIZES, QUERIES, GRID_DTYPES), ids=row_id
)
def test_matches_the_reference(row: tuple) -> None:
    """Lengths around a block's end and 1,000 in one batch.

    B08: padded head sizes. B09: block sizes that are no tile. B10: groups of 1 to 8 heads.
    """
    (num_heads, num_kv_heads), head_size, block_size, query_len, dtype = row
    lengths = [0, 1, block_size - 1, block_size, block_size + 1, 1000]
    if not HAS_GPU:
        # What the interpreter does in about a second: 1,000 keys of few heads, fewer of many.
        most = max(70, 4000 // num_heads)
        if query_len == "full":
            most = max(70, int((200_000 / num_heads) ** 0.5))
        elif block_size < 544 or num_heads <= 8:
            most = max(most, block_size + 1)
        lengths = sorted({min(length, most) for length in lengths})
    query_lens = [length if query_len == "full" else min(query_len, length) for length in lengths]
    if query_len == 1:
        # A sequence of length 0 still has a (padding) row.
        query_lens[0] = 1
    inputs = inputs_of(
        lengths,
        query_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        dtype=DTYPES[dtype],
    )
    check_attention(paged_attention, inputs, max_query_len=max(query_lens))


def test_a_long_prefill() -> None:
    inputs = inputs_of([1000, 3], [1000, 3], num_heads=1, num_kv_heads=1, head_size=16)
    check_attention(paged_attention, inputs)


def test_the_grid_names_every_value() -> None:
    rows = pairwise(HEADS, HEAD_SIZES, BLOCK_SIZES, QUERIES, GRID_DTYPES)
    for axis, values in enumerate((HEADS, HEAD_SIZES, BLOCK_SIZES, QUERIES, GRID_DTYPES)):
        assert {row[axis] for row in rows} == set(values)
    assert len(rows) < 80


SHIPPED = sorted(
    {
        (target.name, head_size, dtype, aligned)
        for target in launch.TARGETS.values()
        for head_size in (64, 128, 192, 256, 576)
        for dtype in ("fp32", "fp16")
        for aligned in (True, False)
    }
)


def test_every_shipped_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles chosen for each GPU, one at a time: the interpreter by itself uses others (B18)."""
    seen = set()
    choose = launch.attention_tiles
    for name, head_size, dtype, aligned in SHIPPED:
        for query_len, group in ((1, 2), (1, 24), (5, 2)):
            itemsize = DTYPES[dtype].itemsize
            sizes = (head_size, group, itemsize, itemsize)
            tiles = choose(launch.TARGETS[name], *sizes, decode=query_len == 1, aligned=aligned)
            shape = (tiles.tile_m, tiles.tile_q, tiles.tile_h, tiles.tile_n, head_size > 256)
            if shape in seen:
                continue
            seen.add(shape)
            monkeypatch.setattr(
                "kernels.paged_attention.attention_tiles", lambda *_, tiles=tiles, **__: tiles
            )
            inputs = inputs_of(
                [70, 9],
                [query_len] * 2,
                num_heads=group,
                num_kv_heads=1,
                head_size=head_size,
                dtype=DTYPES[dtype],
            )
            check_attention(paged_attention, inputs, max_query_len=query_len)
    assert len(seen) > 10


FEATURES = {
    "plain": {},
    "window1": {"sliding_window": 1},
    "window7": {"sliding_window": 7},
    "window64": {"sliding_window": 64},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([2.0**-i for i in range(8)], device=DEVICE)},
    "sinks": {"sinks": torch.linspace(-3, 3, 8, device=DEVICE)},
    "full": {"causal": False},
    "full-sinks-alibi": {
        "causal": False,
        "sinks": torch.linspace(-3, 3, 8, device=DEVICE),
        "alibi_slopes": torch.full((8,), 0.01, device=DEVICE),
    },
    "all": {
        "sliding_window": 33,
        "softcap": 5.0,
        "alibi_slopes": torch.full((8,), 0.125, device=DEVICE),
        "sinks": torch.linspace(-3, 3, 8, device=DEVICE),
    },
}


@pytest.mark.parametrize("num_splits", [1, 3], ids=["whole", "splits3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, dtype: str, num_splits: int) -> None:
    """Decode, chunked prefill, prefill and rows before any key in one call."""
    seq_lens, query_lens = [0, 3, 1, 15, 33, 130, 70], [1, 7, 1, 2, 33, 1, 30]
    if num_splits > 1:
        seq_lens, query_lens = [0, 3, 33, 130], [1, 5, 4, 1]
    inputs = inputs_of(seq_lens, query_lens, dtype=DTYPES[dtype])
    check_attention(paged_attention, inputs, num_splits=num_splits, **FEATURES[feature])


@pytest.mark.gpu_first
@pytest.mark.parametrize(
    "cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [1, 7], ids=["decode", "chunk"])
def test_fp8_caches(query_len: int, dtype: str, cache_dtype: torch.dtype) -> None:
    """A scale may be a number or one a KV head."""
    inputs = inputs_of(
        [20, 70], [query_len] * 2, num_heads=4, dtype=DTYPES[dtype], cache_dtype=cache_dtype
    )
    per_head = torch.tensor([2.0, 0.25], device=DEVICE)
    check_attention(paged_attention, inputs, k_scale=0.5, v_scale=per_head)
    check_attention(paged_attention, inputs, k_scale=per_head, v_scale=per_head[:1])


@pytest.mark.gpu_first
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_unread_slots_change_nothing(poison: float) -> None:
    """B02: 0 * NaN in the product with V let the unwritten tail of the last block through."""
    inputs = inputs_of([5, 17], [1, 1], block_size=16)
    expected, _ = check_attention(paged_attention, inputs)
    caches = []
    for cache in (inputs.key_cache, inputs.value_cache):
        marked = poison_unread_slots_(cache.clone(), inputs.block_tables, inputs.seq_lens)
        caches.append(torch.where(marked.isnan(), poison, marked))
    out = attend(replace(inputs, key_cache=caches[0], value_cache=caches[1]))
    assert out.isfinite().all()
    assert torch.equal(out, expected)


def attend(inputs: AttentionInputs, **options: object) -> torch.Tensor:
    tensors = [getattr(inputs, name) for name in inputs.__dataclass_fields__]
    return paged_attention(*tensors, scale=inputs.scale, **options)


@pytest.mark.gpu_first
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("sinks", [None, torch.zeros(8, device=DEVICE)], ids=["", "sinks"])
def test_empty_sequence_gives_zeros(sinks: torch.Tensor | None, num_splits: int) -> None:
    """B03: a padding row of length 0 gave 0 / 0 and poisoned the batch."""
    inputs = inputs_of([0, 17], [1, 1])
    out, lse = check_attention(paged_attention, inputs, sinks=sinks, num_splits=num_splits)
    assert (out[0] == 0).all()
    assert (lse[0] == float("-inf")).all()


def test_no_tokens_and_no_sequences() -> None:
    inputs = inputs_of([5, 17], [0, 0])
    assert attend(inputs).shape == (0, 8, 64)
    none = replace(
        inputs,
        block_tables=inputs.block_tables[:0],
        seq_lens=inputs.seq_lens[:0],
        query_start_loc=inputs.query_start_loc[:1],
    )
    assert attend(none).shape == (0, 8, 64)


def test_takes_numpys_empty_tables() -> None:
    """Numpy gives an empty array strides of 0, which were refused."""
    inputs = replace(
        inputs_of([0, 0], [1, 1]),
        block_tables=torch.zeros(0, dtype=torch.int32, device=DEVICE).as_strided((2, 0), (0, 0)),
    )
    assert (attend(inputs) == 0).all()


def test_unaligned_caches_take_small_tiles() -> None:
    """Caches that start one element off an address of 16 spilled registers in the large tiles."""
    inputs = inputs_of([17], [1], dtype=torch.bfloat16)
    shape = inputs.key_cache.shape
    storage = torch.zeros(shape.numel() + 1, dtype=torch.bfloat16, device=DEVICE)
    shifted = storage[1:].view(shape)
    tiles = []
    for key_cache in (inputs.key_cache, shifted):
        with launch.record_launches(launch.TARGETS["sm_90"]) as launches:
            attend(replace(inputs, key_cache=key_cache), num_splits=1)
        tiles.append(launches[0].args["TILE_N"])
    assert tiles == [64, 16]
    assert not launch.are_aligned(shifted)
    assert torch.equal(
        attend(replace(inputs, key_cache=shifted.copy_(inputs.key_cache))), attend(inputs)
    )


def test_launches_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current GPU, wherever the tensors are."""
    entered = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        entered.append(chosen)
        yield
        entered.append("left")

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable:
            return lambda *args, **meta: entered.append(grid)

    monkeypatch.setattr(torch.cuda, "device", device)
    with FakeTensorMode():
        tensor = torch.empty(1, device="cuda:1")
    launch.launch(Kernel(), (2,), 1, tensor)
    assert entered == [torch.device("cuda:1"), (2,), "left"]
    launch.launch(Kernel(), (3,), torch.zeros(1))
    assert entered[3:] == [(3,)]


@pytest.mark.parametrize("max_query_len", [None, 1])
@pytest.mark.parametrize("num_splits", [None, 2])
def test_padding_without_sequences(num_splits: int | None, max_query_len: int | None) -> None:
    """Rows of a padded batch without a sequence read the first length, of which there is none."""
    inputs = replace(
        inputs_of([5], [1], head_size=32, num_heads=4),
        query=torch.randn(64, 4, 32, device=DEVICE),
        block_tables=torch.zeros(0, 4, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.zeros(0, dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )
    out = poisoned(64, 4, 32, dtype=torch.float32, device=DEVICE)
    with launch.record_launches(launch.TARGETS["sm_90"]) as launches:
        attend(inputs, out=out, num_splits=num_splits, max_query_len=max_query_len)
    assert launches == []
    returned = attend(inputs, out=out, num_splits=num_splits, max_query_len=max_query_len)
    assert returned is out
    assert out.isnan().all()


def test_softcap_bends_large_scores() -> None:
    """B06: a hand-made tanh gave NaN for large scores. One key: its score is the log-sum-exp."""
    scores = [1.0, 100.0, 1000.0, 5000.0, 10000.0, -10000.0, 4400.0]
    inputs = inputs_of([1] * 7, [1] * 7, num_heads=1, num_kv_heads=1, head_size=16)
    inputs.query.zero_()
    inputs.query[:, 0, 0] = torch.tensor(scores)
    inputs.key_cache.fill_(1.0)
    _, lse = check_attention(paged_attention, inputs, softcap=50.0, scale=1.0)
    expected = torch.tensor([0.99987, 48.2014, 50.0, 50.0, 50.0, -50.0, 50.0])
    torch.testing.assert_close(lse[:, 0].cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu_first
def test_softcap_comes_before_the_mask() -> None:
    """B06: capped after masking, -inf became -cap and masked keys got weight."""
    inputs = inputs_of([40, 5], [20, 5])
    check_attention(paged_attention, inputs, softcap=0.5, sliding_window=4)


@pytest.mark.parametrize("head_size", [16, 80, 96, 112, 120, 192, 576])
def test_padded_lanes_are_not_stored(head_size: int) -> None:
    """B08: head sizes that are no power of two wrote past the head."""
    inputs = inputs_of([1, 20], [1, 3], head_size=head_size)
    wide = poisoned(4, 8, head_size + 24, dtype=torch.float32, device=DEVICE)
    out = wide[..., :head_size]
    attend(inputs, out=out, num_splits=2)
    assert out.isfinite().all()
    assert wide[..., head_size:].isnan().all()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(4, 4), (6, 2), (5, 1), (12, 2), (28, 4), (48, 6), (24, 2), (48, 2), (72, 1)],
    ids=lambda heads: str(heads),
)
@pytest.mark.parametrize("query_len", [1, 5], ids=["decode", "chunk"])
def test_any_group_that_divides(num_heads: int, num_kv_heads: int, query_len: int) -> None:
    """B10: a group of 24 in tiles of 16 read the wrong KV head; groups of 1 to 72 here."""
    inputs = inputs_of(
        [70, 5], [query_len] * 2, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=16
    )
    check_attention(paged_attention, inputs, max_query_len=query_len)


@pytest.mark.parametrize("padding", [-1, 2**31 - 1], ids=["minus1", "max"])
@pytest.mark.parametrize("spare_columns", [0, 5])
def test_table_padding_is_never_read(padding: int, spare_columns: int) -> None:
    """B11: padding entries were used as block ids, and rows read past their end."""
    inputs = inputs_of([16, 1, 48, 33], [1] * 4, table_padding=padding, spare_columns=spare_columns)
    check_attention(paged_attention, inputs)
    check_attention(paged_attention, inputs, num_splits=2)


@pytest.mark.parametrize("max_query_len", [None, 1])
def test_only_the_first_axis_grows(max_query_len: int | None) -> None:
    """B14: 70,000 sequences on the grid's second axis are an invalid CUDA launch."""
    num_seqs = 70_000
    inputs = inputs_of([1], [1])
    many = replace(
        inputs,
        query=inputs.query.expand(num_seqs, -1, -1),
        block_tables=inputs.block_tables[:, :1].expand(num_seqs, -1),
        seq_lens=inputs.seq_lens.repeat(num_seqs),
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE),
    )
    with launch.record_launches(launch.TARGETS["sm_90"]) as launches:
        attend(many, max_query_len=max_query_len)
        attend(many, max_query_len=max_query_len, num_splits=4)
    assert len(launches) == 3
    for made in launches:
        assert made.grid[0] >= num_seqs
        assert all(size <= launch.MAX_GRID_YZ for size in made.grid[1:])


@pytest.mark.gpu_first
@pytest.mark.parametrize("num_splits", [2, 4, 16])
def test_splits_equal_the_whole(num_splits: int) -> None:
    """B21: empty splits gave NaN, and the merge wrote past its rows."""
    inputs = inputs_of([1, 15, 16, 17, 1000], [1] * 5, num_heads=4)
    whole = attend(inputs, num_splits=1)
    target = guarded(5, 4, 64, dtype=torch.float32, device=DEVICE)
    attend(inputs, num_splits=num_splits, out=target.tensor)
    target.assert_guards_intact()
    torch.testing.assert_close(target.tensor, whole, rtol=2e-6, atol=2e-6)


def test_rows_past_the_batch_are_left_alone() -> None:
    """A captured graph runs with padding rows that belong to no sequence."""
    inputs = inputs_of([9, 40], [1, 1])
    padded = replace(inputs, query=torch.cat([inputs.query, inputs.query, inputs.query]))
    for num_splits in (1, 2):
        out = poisoned(6, 8, 64, dtype=torch.float32, device=DEVICE)
        attend(padded, out=out, num_splits=num_splits)
        assert out[:2].isfinite().all()
        assert out[2:].isnan().all()


@pytest.mark.gpu_first
def test_decode_and_chunks_equal_prefill() -> None:
    """The same rows whether computed at once, in chunks, or one by one."""
    whole = inputs_of([37], [37])
    prefill = attend(whole, sliding_window=20)
    for chunk in (1, 7, 20):
        rows = []
        for start in range(0, 37, chunk):
            end = min(start + chunk, 37)
            part = replace(
                whole,
                query=whole.query[start:end],
                seq_lens=torch.full_like(whole.seq_lens, end),
                query_start_loc=torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
            )
            rows.append(attend(part, sliding_window=20, max_query_len=end - start))
        torch.testing.assert_close(torch.cat(rows), prefill, rtol=3e-6, atol=3e-6)


@pytest.mark.gpu_first
def test_where_a_block_lies_changes_no_bit() -> None:
    """A29: with one configuration a cache hit gives bit-equal outputs, wherever its blocks lie."""
    inputs = inputs_of([100, 33], [1, 9])
    order = torch.randperm(len(inputs.key_cache), device=DEVICE)
    place = torch.argsort(order).to(torch.int32)
    table = inputs.block_tables
    moved = replace(
        inputs,
        key_cache=inputs.key_cache[order],
        value_cache=inputs.value_cache[order],
        block_tables=torch.where(table >= 0, place[table.clamp(min=0).long()], table),
    )
    assert torch.equal(attend(inputs), attend(moved))


@pytest.mark.gpu_first
def test_prefix_and_suffix_merge_to_the_whole() -> None:
    """Attention over a shared prefix and over the rest, joined by log-sum-exp."""
    from kernels.merge_states import merge_states

    inputs = inputs_of([80], [8], block_size=16)
    whole, whole_lse = check_attention(paged_attention, inputs)
    prefix = replace(inputs, seq_lens=torch.full_like(inputs.seq_lens, 48))
    suffix = replace(
        inputs,
        seq_lens=torch.full_like(inputs.seq_lens, 32),
        block_tables=inputs.block_tables[:, 3:],
    )
    parts = [
        attend(prefix, causal=False, return_lse=True),
        attend(suffix, causal=True, return_lse=True),
    ]
    out, lse = merge_states(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))
    torch.testing.assert_close(out, whole, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("layout", ["interleaved", "hnd", "mixed"])
def test_addresses_by_strides_alone(layout: str) -> None:
    """K and V as views of one tensor, heads before slots, and K and V laid out differently."""
    inputs = inputs_of([70, 5, 17], [1, 5, 2])
    both = torch.stack([inputs.key_cache, inputs.value_cache], dim=1)
    hnd = [
        cache.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
        for cache in (inputs.key_cache, inputs.value_cache)
    ]
    key_cache, value_cache = {
        "interleaved": (both[:, 0], both[:, 1]),
        "hnd": hnd,
        "mixed": (both[:, 0], hnd[1]),
    }[layout]
    moved = replace(inputs, key_cache=key_cache, value_cache=value_cache)
    assert torch.equal(attend(moved), attend(inputs))


def far_apart(inputs: AttentionInputs, block_stride: int) -> AttentionInputs:
    """`inputs` with fp8 caches whose blocks lie `block_stride` bytes apart, half before address 0.

    The pages between are never touched, so they cost no memory, and what a wrapped 32-bit offset
    would reach is still inside.
    """
    num_blocks = len(inputs.key_cache)
    storage = torch.empty(
        2**31 + num_blocks * block_stride, dtype=inputs.key_cache.dtype, device=DEVICE
    )
    caches = []
    for shift, cache in ((0, inputs.key_cache), (block_stride // 2, inputs.value_cache)):
        strides = (block_stride, *cache.stride()[1:])
        view = torch.as_strided(storage, cache.shape, strides, 2**31 + shift)
        caches.append(view.copy_(cache))
    return replace(inputs, key_cache=caches[0], value_cache=caches[1])


def test_offsets_past_two_billion_elements() -> None:
    """Block ids become int64 before they meet a stride."""
    inputs = inputs_of([150], [3], cache_dtype=torch.float8_e5m2, head_size=16)
    expected = attend(inputs)
    block_stride = 2**28
    assert int(inputs.block_tables.max()) * block_stride > 2**31
    assert torch.equal(attend(far_apart(inputs, block_stride)), expected)


@pytest.mark.skipif(HAS_GPU, reason="the traffic meter needs the interpreter")
@pytest.mark.parametrize("block_size", [1, 8, 12, 16, 128])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_reads_each_key_once_per_kv_head(block_size: int, num_splits: int) -> None:
    inputs = inputs_of([1, 17, 128, 300], [1] * 4, block_size=block_size)
    with traffic_meter(key=inputs.key_cache, value=inputs.value_cache) as traffic:
        attend(inputs, num_splits=num_splits, max_query_len=1)
    needed = (1 + 17 + 128 + 300) * 2 * 64 * 4
    assert traffic.read == {"key": needed, "value": needed}
    assert traffic.written == {"key": 0, "value": 0}


@pytest.mark.skipif(HAS_GPU, reason="the traffic meter needs the interpreter")
def test_window_reads_only_its_keys() -> None:
    """Tiles before the window are skipped, and so are the first tile's slots outside it."""
    inputs = inputs_of([1000, 300, 5], [1] * 3)
    with traffic_meter(key=inputs.key_cache, table=inputs.block_tables) as traffic:
        attend(inputs, sliding_window=100, max_query_len=1)
    assert traffic.read["key"] == (100 + 100 + 5) * 2 * 64 * 4
    # One block-table entry a key that is read and KV head.
    assert traffic.read["table"] == (100 + 100 + 5) * 2 * 4


@pytest.mark.skipif(HAS_GPU, reason="the traffic meter needs the interpreter")
def test_prefill_reads_no_key_after_its_last_query() -> None:
    """A causal tile stops at its own diagonal: 4 tiles of 16 tokens read 16, 32, 48, 64 keys."""
    inputs = inputs_of([64], [64], num_heads=4, num_kv_heads=1)
    with traffic_meter(key=inputs.key_cache) as traffic:
        attend(inputs)
    assert traffic.read["key"] == (16 + 32 + 48 + 64) * 64 * 4


GOOD = {"scale": 0.1}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"query": torch.zeros(2, 33, 64)}, {}, "33 query heads"),
        ({"query": torch.zeros(2, 3, 64)}, {}, "3 query heads"),
        ({"query": torch.zeros(2, 8)}, {}, "query has shape"),
        ({"query": torch.zeros(2, 8, 64, dtype=torch.float64)}, {}, "query is float64"),
        ({"query": torch.zeros(2, 8, 64, dtype=torch.float16)}, {}, "key_cache is float32"),
        ({"query": torch.zeros(2, 8, 32)}, {}, "key_cache has shape"),
        ({"query": torch.zeros(2, 64, 8).transpose(1, 2)}, {}, "last one must be 1"),
        ({"query": torch.zeros(2, 8, 64, device="meta")}, {}, "is on"),
        (dict.fromkeys(("key_cache", "value_cache"), torch.zeros(9, 0, 2, 64)), {}, "size is 0"),
        ({"value_cache": torch.zeros(8, 16, 2, 64)}, {}, "value_cache has shape"),
        ({"block_tables": torch.zeros(2, 3, dtype=torch.int64)}, {}, "block_tables is int64"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, {}, "seq_lens has shape"),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, {}, "query_start_loc has shape"),
        ({}, {"scale": 0.0}, "scale is 0.0"),
        ({}, {"scale": float("nan")}, "scale is nan"),
        ({}, {"scale": float("inf")}, "scale is inf"),
        ({}, {"scale": None}, "scale is None"),
        ({}, {"sliding_window": 0}, "sliding_window is 0"),
        ({}, {"sliding_window": 4, "causal": False}, "needs causal"),
        ({}, {"sliding_window": 4.5}, "sliding_window is 4.5"),
        ({}, {"softcap": 0.0}, "softcap is 0.0"),
        ({}, {"softcap": float("inf")}, "softcap is inf"),
        ({}, {"num_splits": 0}, "num_splits is 0"),
        ({}, {"num_splits": 2.0}, "num_splits is 2.0"),
        ({}, {"max_query_len": -1}, "max_query_len is -1"),
        ({}, {"sinks": torch.zeros(2)}, "sinks has shape"),
        ({}, {"alibi_slopes": torch.zeros(8, dtype=torch.float16)}, "alibi_slopes is float16"),
        ({}, {"k_scale": 2.0}, "for fp8 caches"),
        ({}, {"out": torch.zeros(2, 8, 32)}, "out has shape"),
        ({}, {"out": torch.zeros(8, 64).expand(2, -1, -1)}, "out has strides"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)  # fmt: skip
def test_refuses_before_launching(changes: dict, options: dict, message: str) -> None:
    inputs = attention_inputs([5, 17], [1, 1], block_size=16)
    inputs = replace(inputs, **changes)
    tensors = [getattr(inputs, name) for name in inputs.__dataclass_fields__]
    with (
        launch.record_launches(launch.TARGETS["sm_90"]) as launches,
        pytest.raises(ValueError, match=message),
    ):
        paged_attention(*tensors, **{**GOOD, **options})
    assert launches == []


def test_refuses_fp8_where_the_gpu_has_none() -> None:
    inputs = attention_inputs([5], [1], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    tensors = [getattr(inputs, name) for name in inputs.__dataclass_fields__]
    with (
        launch.record_launches(launch.TARGETS["sm_80"]),
        pytest.raises(ValueError, match="sm_80 does not support"),
    ):
        paged_attention(*tensors, **GOOD)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_that_fill_a_gpu(dtype: str) -> None:
    inputs = inputs_of(
        [4096] * 64 + list(range(1, 1000, 37)) + [2048] * 4,
        [1] * 91 + [2048, 17, 300, 1],
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        dtype=DTYPES[dtype],
    )
    check_attention(paged_attention, inputs)


@pytest.mark.gpu
def test_captured_at_one_length_replays_at_another() -> None:
    """B20: a grid or split count from the lengths was captured at 1 and cut long sequences."""
    inputs = inputs_of([1000] * 4, [1] * 4, dtype=torch.bfloat16)
    lens = inputs.seq_lens.clone()
    out = torch.empty_like(inputs.query)
    inputs.seq_lens.fill_(1)
    attend(inputs, out=out, max_query_len=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(inputs, out=out, max_query_len=1)
    inputs.seq_lens.copy_(lens)
    graph.replay()
    expected = attend(inputs, max_query_len=1)
    assert torch.equal(out, expected)
