"""Merging attention over disjoint sets of keys by their log-sum-exp."""

import numpy as np
import pytest
import torch

from kernels import launch, reference
from kernels.merge_states import launch_merge, merge_states
from kernels.testing import assert_within_budget, guarded, poisoned, traffic_meter

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def states(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    outs = torch.randn(shape).to(dtype).to(DEVICE)
    return outs, (4 * torch.randn(shape[:3])).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(1, 3, 2, 16), (2, 1, 5, 80), (4, 3, 2, 128), (5, 2, 2, 96), (16, 2, 1, 576), (17, 1, 3, 64)],
    ids=str,
)
def test_matches_the_reference(shape: tuple[int, ...], dtype: str) -> None:
    outs, lses = states(*shape, dtype=DTYPES[dtype])
    out = poisoned(*shape[1:], dtype=outs.dtype, device=DEVICE)
    lse = poisoned(*shape[1:3], dtype=torch.float32, device=DEVICE)
    returned = merge_states(outs, lses, out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    exact_out, exact_lse = reference.merge_states(outs.double(), lses.double())
    eager_out, eager_lse = reference.merge_states(outs, lses)
    assert_within_budget(out, exact_out, eager_out)
    assert_within_budget(lse, exact_lse, eager_lse)


def test_two_states_by_hand() -> None:
    """The docstring's example."""
    outs = torch.tensor([1.0, 3.0], device=DEVICE).view(2, 1, 1, 1).repeat(1, 1, 1, 16)
    lses = torch.tensor([1.0, 3.0], device=DEVICE).log().view(2, 1, 1)
    out, lse = merge_states(outs, lses)
    torch.testing.assert_close(out, torch.full((1, 1, 16), 2.5, device=DEVICE))
    torch.testing.assert_close(lse, torch.full((1, 1), 4.0, device=DEVICE).log())


def test_empty_states_add_nothing_and_are_not_read() -> None:
    """B21: -inf minus -inf gave NaN, and an empty split's outs were never written."""
    outs, lses = states(6, 4, 2, 64)
    lses[[0, 3]] = float("-inf")
    expected = merge_states(outs[[1, 2, 4, 5]], lses[[1, 2, 4, 5]])
    outs[[0, 3]] = float("nan")
    out, lse = merge_states(outs, lses)
    torch.testing.assert_close(out, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=1e-6)


def test_all_empty_gives_zeros() -> None:
    """B03: a row without keys is 0 with a log-sum-exp of -inf, not 0 / 0."""
    outs = poisoned(3, 2, 2, 64, dtype=torch.float32, device=DEVICE)
    out, lse = merge_states(outs, torch.full((3, 2, 2), float("-inf"), device=DEVICE))
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_large_log_sums_do_not_overflow() -> None:
    outs, lses = states(3, 2, 2, 16)
    out, lse = merge_states(outs, lses)
    shifted_out, shifted_lse = merge_states(outs, lses + 5000.0)
    torch.testing.assert_close(shifted_out, out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(shifted_lse, lse + 5000.0, rtol=1e-6, atol=1e-3)


def test_order_and_nesting_do_not_matter() -> None:
    outs, lses = states(5, 3, 2, 32)
    expected = merge_states(outs, lses)
    order = torch.tensor([3, 0, 4, 1, 2], device=DEVICE)
    pair = merge_states(outs[:2], lses[:2])
    nested = merge_states(
        torch.cat([pair[0][None], outs[2:]]), torch.cat([pair[1][None], lses[2:]])
    )
    for got in (merge_states(outs[order], lses[order]), nested):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_writes_only_its_rows() -> None:
    """B21: the row stride was taken for the head size; here a head of 80 in rows of 96."""
    outs, lses = states(3, 4, 2, 80)
    target = guarded(4, 2, 96, dtype=torch.float32, device=DEVICE)
    merge_states(outs, lses, out=target.tensor[..., :80])
    target.assert_guards_intact()
    assert target.tensor[..., :80].isfinite().all()
    assert target.tensor[..., 80:].isnan().all()


def test_an_empty_batch_of_numpy_arrays() -> None:
    """Numpy gives an empty array strides of 0, which were refused."""
    outs = torch.from_numpy(np.empty((2, 0, 4, 16), dtype=np.float32)).to(DEVICE)
    empty = torch.zeros(0, device=DEVICE).as_strided((2, 0, 4, 16), (0, 0, 0, 0))
    lses = torch.zeros(2, 0, 4, device=DEVICE)
    for states_of_none in (outs, empty):
        out, lse = merge_states(states_of_none, lses)
        assert out.shape == (0, 4, 16)
        assert lse.shape == (0, 4)


def test_strided_states() -> None:
    outs, lses = states(3, 4, 2, 16)
    moved = outs.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    expected = merge_states(outs, lses)
    got = merge_states(moved, lses.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    assert torch.equal(got[0], expected[0])


def test_rows_past_the_count_are_left_alone() -> None:
    outs, lses = states(2, 4, 2, 16)
    out = poisoned(4, 2, 16, dtype=torch.float32, device=DEVICE)
    count = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    launch_merge(outs, lses, out, None, count)
    assert out[:3].isfinite().all()
    assert out[3].isnan().all()


@pytest.mark.skipif(HAS_GPU, reason="the traffic meter needs the interpreter")
def test_reads_each_state_once() -> None:
    outs, lses = states(7, 3, 2, 80)
    lses[2] = float("-inf")
    with traffic_meter(outs=outs, lses=lses) as traffic:
        merge_states(outs, lses)
    assert traffic.read["outs"] == 6 * 3 * 2 * 80 * 4
    assert traffic.other_written == 3 * 2 * (80 + 1) * 4


def test_only_the_first_axis_grows() -> None:
    """B14: 70,000 rows."""
    outs = torch.zeros(1, 1, 2, 16).expand(2, 70_000, 2, 16)
    with launch.record_launches(launch.TARGETS["sm_90"]) as launches:
        merge_states(outs, torch.zeros(2, 70_000, 2))
    assert launches[0].grid == (70_000, 2)


@pytest.mark.parametrize(
    ("outs", "lses", "options", "message"),
    [
        (torch.zeros(2, 3, 16), torch.zeros(2, 3), {}, "outs has shape"),
        (torch.zeros(0, 3, 2, 16), torch.zeros(0, 3, 2), {}, "no states"),
        (torch.zeros(2, 3, 0, 16), torch.zeros(2, 3, 0), {}, "num_heads is 0"),
        (torch.zeros(2, 3, 2, 0), torch.zeros(2, 3, 2), {}, "head_size is 0"),
        (torch.zeros(2, 3, 2, 16).double(), torch.zeros(2, 3, 2), {}, "outs is float64"),
        (torch.zeros(2, 3, 2, 16), torch.zeros(2, 3), {}, "lses has shape"),
        (torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 2).half(), {}, "lses is float16"),
        (torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 2, device="meta"), {}, "lses is on meta"),
        (torch.zeros(2, 3, 16, 2).transpose(2, 3), torch.zeros(2, 3, 2), {}, "last one must be 1"),
        (torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 2), {"out": torch.zeros(3, 2, 8)}, "out has"),
        (torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 2), {"lse": torch.zeros(3)}, "lse has shape"),
        (
            torch.zeros(2, 3, 2, 16),
            torch.zeros(2, 3, 2),
            {"out": torch.zeros(2, 16).expand(3, -1, -1)},
            "out has strides",
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)  # fmt: skip
def test_refuses_before_launching(
    outs: torch.Tensor, lses: torch.Tensor, options: dict, message: str
) -> None:
    with (
        launch.record_launches(launch.TARGETS["sm_90"]) as launches,
        pytest.raises(ValueError, match=message),
    ):
        merge_states(outs, lses, **options)
    assert launches == []
