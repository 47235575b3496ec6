"""The test tools themselves: a meter that miscounts or a tolerance that forgives proves nothing."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kernels import merge_states
from kernels.testing import (
    SENTINEL,
    assert_within_budget,
    attention_inputs,
    guarded,
    is_poison,
    mutant,
    poison_unread_slots_,
    poisoned,
    traffic_meter,
)

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the traffic meter needs the interpreter"
)


@triton.jit
def _copy_kernel(source_ptr, target_ptr, count_ptr, n, TILE: tl.constexpr):
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = offset < n
    tl.store(target_ptr + offset, tl.load(source_ptr + offset, mask=mask), mask=mask)
    tl.atomic_add(count_ptr, 1)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_meter_counts_unmasked_lanes(dtype: torch.dtype) -> None:
    source, target = torch.ones(100, dtype=dtype), torch.zeros(100, dtype=dtype)
    count = torch.zeros(1, dtype=torch.int32)
    with traffic_meter(source=source, target=target) as traffic:
        _copy_kernel[(4,)](source, target, count, 70, TILE=32)
    size = source.element_size()
    assert traffic.read == {"source": 70 * size, "target": 0}
    assert traffic.written == {"source": 0, "target": 70 * size}
    assert traffic.other_read == traffic.other_written == 4 * 4
    assert count.item() == 4


@needs_interpreter
def test_meter_stops_with_its_block() -> None:
    source, target = torch.ones(32), torch.zeros(32)
    count = torch.zeros(1, dtype=torch.int32)
    with traffic_meter(source=source) as traffic:
        pass
    _copy_kernel[(1,)](source, target, count, 32, TILE=32)
    assert traffic.read == {"source": 0}


@needs_interpreter
def test_meter_tells_a_view_from_the_rest_of_its_storage() -> None:
    storage = torch.ones(64)
    count = torch.zeros(1, dtype=torch.int32)
    with traffic_meter(first=storage[:32], second=storage[32:]) as traffic:
        _copy_kernel[(1,)](storage[:32], storage[32:], count, 20, TILE=32)
    assert traffic.read == {"first": 80, "second": 0}
    assert traffic.written == {"first": 0, "second": 80}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.uint8,
    ],
)
def test_poison_is_recognised(dtype: torch.dtype) -> None:
    tensor = poisoned(3, 5, dtype=dtype)
    assert is_poison(tensor).all()
    tensor[1, 2] = 1
    assert int((~is_poison(tensor)).sum()) == 1
    if dtype == torch.int64:
        assert tensor[0, 0] == SENTINEL


def test_unread_slots_are_poisoned_and_read_ones_kept() -> None:
    inputs = attention_inputs([5, 0, 16], [1, 1, 1], block_size=8, head_size=16)
    before = inputs.key_cache.clone()
    cache = poison_unread_slots_(
        inputs.key_cache, inputs.block_tables, inputs.seq_lens, torch.tensor([2, 0, 0])
    )
    assert cache is inputs.key_cache
    kept = ~is_poison(cache).any(-1).any(-1)  # [num_blocks, block_size]
    assert int(kept.sum()) == 3 + 16
    first = int(inputs.block_tables[0, 0])
    assert kept[first].tolist() == [False, False, True, True, True, False, False, False]
    assert torch.equal(cache[kept], before[kept])


def test_no_sequence_owns_block_0() -> None:
    """A masked block-table entry reads as 0: that block must be one whose reading shows."""
    inputs = attention_inputs([70, 3, 16], [1, 1, 1])
    assert (inputs.block_tables != 0).all()


def test_budget_is_earned_not_given() -> None:
    exact = torch.linspace(-1, 1, 50, dtype=torch.float64)
    eager = (exact + 1e-4).float()
    assert_within_budget((exact + 1.9e-4).float(), exact, eager)
    with pytest.raises(AssertionError, match="budget"):
        assert_within_budget((exact + 2.1e-4).float(), exact, eager)
    # An exact eager version leaves one rounding and nothing more.
    with pytest.raises(AssertionError, match="budget"):
        assert_within_budget((exact + 1e-6).float(), exact, exact.float())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_budget_refuses_what_is_not_finite(value: float) -> None:
    exact = torch.zeros(3, dtype=torch.float64)
    actual = torch.tensor([0.0, value, 0.0])
    with pytest.raises(AssertionError, match="NaN or inf"):
        assert_within_budget(actual, exact, exact.float())


def test_budget_wants_infinities_where_the_reference_has_them() -> None:
    exact = torch.tensor([0.0, float("-inf")], dtype=torch.float64)
    assert_within_budget(exact.float(), exact, exact.float())
    with pytest.raises(AssertionError, match="infinite"):
        assert_within_budget(torch.tensor([0.0, -100.0]), exact, exact.float())


def test_guards_notice_a_write_outside() -> None:
    inside = guarded(4, 8, dtype=torch.float16)
    inside.tensor.fill_(1.0)
    inside.assert_guards_intact()
    for position in (inside.margin - 1, inside.margin + 32):
        outside = guarded(4, 8, dtype=torch.float16)
        outside.storage[position] = 0.0
        with pytest.raises(AssertionError, match="outside"):
            outside.assert_guards_intact()


def test_mutant_is_a_copy() -> None:
    with mutant(merge_states, "outs * weights[:, None]", "outs") as changed:
        assert changed.merge_states is not merge_states.merge_states
        assert changed.__name__.startswith("kernels.")
    assert "outs * weights[:, None]" in Path(merge_states.__file__).read_text()
