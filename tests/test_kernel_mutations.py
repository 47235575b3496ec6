"""Do the checks bite? Each fault is put into the kernel's source, and the check must go red.

A fault here never reaches memory outside what its check allocated, so it can't bring down the run.
"""

from collections.abc import Callable

import pytest
import torch
from triton.runtime.errors import InterpreterError

from kernels import merge_states, paged_attention, reference, write_kv
from kernels.testing import (
    AttentionInputs,
    attention_inputs,
    check_attention,
    guarded,
    mutant,
    poisoned,
    traffic_meter,
)

# Wrong results are assertions; a bad address or an overflow is refused by the interpreter.
RED = (AssertionError, InterpreterError)
HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(HAS_GPU, reason="a wild address is an error of its own on a GPU")


def ragged(module: object, **options: object) -> None:
    """Decode, a chunk and a prefill in one call, then decode alone, over poisoned memory."""
    torch.manual_seed(0)
    inputs = attention_inputs([200, 60, 5], [1, 50, 5], head_size=16, num_heads=4)
    check_attention(module.paged_attention, inputs, **options)
    inputs = attention_inputs([200, 5], [1, 1], head_size=16, num_heads=4)
    check_attention(module.paged_attention, inputs, max_query_len=1, **options)


def windowed(module: object) -> None:
    ragged(module, sliding_window=9)
    torch.manual_seed(0)
    inputs = attention_inputs([70, 33, 5], [1, 1, 1], head_size=16)
    check_attention(module.paged_attention, inputs, sliding_window=9, max_query_len=1)


def with_options(**options: object) -> Callable[[object], None]:
    return lambda module: ragged(module, **options)


def odd_head(module: object) -> None:
    """A head of 32 lanes and a tail of 8, in rows with room behind it."""
    torch.manual_seed(0)
    inputs = attention_inputs([40], [3], head_size=40)
    wide = poisoned(3, 8, 64, dtype=torch.float32)
    attend(module, inputs, out=wide[..., :40])
    assert wide[..., 40:].isnan().all()
    check_attention(module.paged_attention, inputs)


def attend(module: object, inputs: AttentionInputs, **options: object) -> torch.Tensor:
    tensors = [getattr(inputs, name) for name in inputs.__dataclass_fields__]
    return module.paged_attention(*tensors, scale=inputs.scale, **options)


def reads_once(module: object) -> None:
    torch.manual_seed(0)
    inputs = attention_inputs([70, 3], [1, 1])
    with traffic_meter(key=inputs.key_cache, value=inputs.value_cache) as traffic:
        attend(module, inputs)
    assert traffic.read == dict.fromkeys(("key", "value"), (70 + 3) * 2 * 64 * 4)


def fp8(module: object) -> None:
    torch.manual_seed(0)
    inputs = attention_inputs([40], [3], head_size=16, cache_dtype=torch.float8_e5m2)
    scale = torch.tensor([2.0, 0.25])
    check_attention(module.paged_attention, inputs, k_scale=scale, v_scale=scale)


def far_blocks(module: object) -> None:
    """Blocks 2^28 bytes apart; what a wrapped 32-bit offset reaches is still in the storage."""
    torch.manual_seed(0)
    inputs = attention_inputs([150], [1], head_size=16, cache_dtype=torch.float8_e5m2)
    storage = torch.empty(2**31 + 13 * 2**28, dtype=torch.float8_e5m2)
    caches = []
    for shift, cache in ((0, inputs.key_cache), (2**27, inputs.value_cache)):
        strides = (2**28, *cache.stride()[1:])
        caches.append(torch.as_strided(storage, cache.shape, strides, 2**31 + shift).copy_(cache))
    tables = (inputs.block_tables, inputs.seq_lens, inputs.query_start_loc)
    expected = reference.paged_attention(
        inputs.query, inputs.key_cache, inputs.value_cache, *tables, scale=inputs.scale
    )
    out = module.paged_attention(inputs.query, *caches, *tables, scale=inputs.scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


ATTENTION = {
    "no-mask-on-keys": (
        "mask=kv_mask, other=0.0)\n        value = tl.load(value_ptr",
        "mask=lane_ok[None, :], other=0.0)\n        value = tl.load(value_ptr",
        reads_once,
    ),
    "no-mask-on-values": (
        "value_ptr + value_offset[:, None] + lane[None, :], mask=kv_mask",
        "value_ptr + value_offset[:, None] + lane[None, :], mask=lane_ok[None, :]",
        ragged,
    ),
    "no-mask-on-scores": ("visible = key_ok[None, :]", "visible = key_ok[None, :] | True", ragged),
    "not-causal": (
        "visible & (key_position[None, :] <= position[:, None])",
        "visible & (key_position[None, :] <= position[:, None] + 1)",
        ragged,
    ),
    "window-one-too-wide": (
        "visible & (key_position[None, :] > position[:, None] - sliding_window)",
        "visible & (key_position[None, :] >= position[:, None] - sliding_window)",
        windowed,
    ),
    "window-one-too-narrow": (
        "context_len + first_query - sliding_window + 1, 0",
        "context_len + first_query - sliding_window + 2, 0",
        windowed,
    ),
    "window-ignored": (
        "key_ok & (key_position >= first_key)",
        "key_ok & (key_position >= 0)",
        windowed,
    ),
    "int32-addresses": ("block = block.to(tl.int64)", "block = block.to(tl.int32)", far_blocks),
    "unscaled-dot": ("factor = scale * LOG2E", "factor = LOG2E + scale * 0.0", ragged),
    "natural-exponent": ("weights = tl.exp2(scores", "weights = tl.exp(scores", ragged),
    "last-tile-skipped": (
        "range(first_tile * TILE_N, end_tile * TILE_N, TILE_N)",
        "range(first_tile * TILE_N, end_tile * TILE_N - TILE_N, TILE_N)",
        ragged,
    ),
    "keys-and-values-swapped": (
        "target_lse,\n        query,\n        key_cache,\n        value_cache,",
        "target_lse,\n        query,\n        value_cache,\n        key_cache,",
        ragged,
    ),
    "no-rescaling": ("value, acc * decay[:, None]", "value, acc + 0 * decay[:, None]", ragged),
    "sum-not-rescaled": ("total = total * decay", "total = total", ragged),
    "wrong-kv-head": (
        "key_cache_ptr + kv_head * stride_kc_head",
        "key_cache_ptr + 0 * kv_head * stride_kc_head",
        ragged,
    ),
    "wrong-slot": ("slot = key_position % BLOCK_SIZE", "slot = key_position % 8", ragged),
    "tiles-overlap": ("// TILE_Q - seq) * TILE_Q", "// TILE_Q - seq) * (TILE_Q // 2)", ragged),
    "a-split-is-lost": (
        "end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)",
        "end_tile = tl.minimum(first_tile + tiles_per_split, end_tile - split)",
        with_options(num_splits=2),
    ),
    "sink-in-every-split": (
        "sink_keys = tl.where(split == 0, seq_len, 0)",
        "sink_keys = tl.where(split >= 0, seq_len, 0)",
        with_options(num_splits=2, sinks=torch.ones(4)),
    ),
    "alibi-sign": (
        "key_position[None, :] - position[:, None]).to",
        "position[:, None] - key_position[None, :]).to",
        with_options(alibi_slopes=torch.full((4,), 0.1)),
    ),
    "softcap-unscaled": (
        "return softcap * tl.where(x2",
        "return 1.0 * tl.where(x2",
        with_options(softcap=2.0),
    ),
    "padded-lane-stored": (
        "mask=row_ok[:, None] & tail_ok[None, :],\n        )\n    if lse_ptr",
        "mask=row_ok[:, None] & (tail_ok | True)[None, :],\n        )\n    if lse_ptr",
        odd_head,
    ),
    "k-scale-dropped": ("scale = scale * tl.load(k_", "scale = scale + 0 * tl.load(k_", fp8),
    "v-scale-dropped": ("v_scale * tl.load(v_scale_ptr", "v_scale + 0 * tl.load(v_scale_ptr", fp8),
    "lse-in-base-2": ("(largest + tl.log2(divisor)) * LN2", "(largest + tl.log2(divisor))", ragged),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_check_catches(name: str) -> None:
    old, new, check = ATTENTION[name]
    with mutant(paged_attention, old, new) as faulty, pytest.raises(RED):
        check(faulty)


@pytest.mark.parametrize("check", list(dict.fromkeys(check for _, _, check in ATTENTION.values())))
def test_attention_checks_pass_without_a_fault(check: Callable) -> None:
    with mutant(paged_attention, "MAX_HEAD_SIZE = 576", "MAX_HEAD_SIZE = 577") as same:
        check(same)


def merging(module: object) -> None:
    torch.manual_seed(0)
    outs, lses = torch.randn(6, 3, 2, 24), torch.randn(6, 3, 2)
    lses[:, 0] = float("-inf")
    lses[4] = float("-inf")
    outs[4] = float("nan")
    target = guarded(3, 2, 24, dtype=torch.float32)
    expected = reference.merge_states(outs, lses)
    out, lse = module.merge_states(outs, lses, out=target.tensor)
    target.assert_guards_intact()
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)


MERGE = {
    "empty-minus-empty": ('tl.where(shift == float("-inf"), 0.0, shift)', "shift"),
    "reads-empty-states": ("mask=(weights > 0)[:, None] & ", "mask=(weights > -1)[:, None] & "),
    "divides-by-zero": ("divisor = tl.where(total == 0.0, 1.0, total)", "divisor = total"),
    "last-states-skipped": ("merged += outs", "merged += (start == 0) * outs"),
    "unweighted": ("outs * weights[:, None]", "outs"),
}


@pytest.mark.parametrize("name", MERGE)
def test_merge_check_catches(name: str) -> None:
    old, new = MERGE[name]
    with mutant(merge_states, old, new) as faulty, pytest.raises(RED):
        merging(faulty)


def test_merge_check_passes_without_a_fault() -> None:
    merging(merge_states)


def writing(module: object) -> None:
    torch.manual_seed(0)
    key, value = torch.randn(4, 2, 24), torch.randn(4, 2, 24)
    slots = torch.tensor([5, -1, 79, 17])
    storages = [poisoned(14, 8, 2, 24, dtype=torch.float32) for _ in range(4)]
    caches = [storage[2:12] for storage in storages]
    module.write_kv(key, value, *caches[:2], slots)
    reference.write_kv(key, value, *caches[2:], slots)
    for got, want in zip(storages[:2], storages[2:], strict=True):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


WRITE = {
    "minus-one-is-a-slot": ("(slot < 0) | (slot >= num_slots)", "slot >= num_slots"),
    "values-into-keys": ("value.to(value_cache_ptr.dtype.element_ty)", "key"),
    "next-block": ("block = slot // BLOCK_SIZE", "block = slot // BLOCK_SIZE + 1"),
    "lanes-unmasked": ("(lane < HEAD_SIZE)[None, :]", "(lane < TILE_D)[None, :]"),
}


@pytest.mark.parametrize("name", WRITE)
def test_write_check_catches(name: str) -> None:
    old, new = WRITE[name]
    with mutant(write_kv, old, new) as faulty, pytest.raises(RED):
        writing(faulty)


def test_write_check_passes_without_a_fault() -> None:
    writing(write_kv)


def test_a_mutation_must_apply_once() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"), mutant(write_kv, "no such text", ""):
        pass
