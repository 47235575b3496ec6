"""What is said of a kernel without a GPU: compiled elsewhere, metered here, predicted from both."""

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments.bench.compiling import compile_elsewhere
from experiments.bench.config import (
    BenchConfig,
    CacheDtype,
    CopyConfig,
    DecodeConfig,
    Dtype,
    GatherConfig,
    HashConfig,
    MatchConfig,
    MatchGatherConfig,
    MergeConfig,
    OperationConfig,
    PrefillConfig,
    SwapConfig,
    TileConfig,
    WriteConfig,
)
from experiments.bench.implementations.prefixlab import launched_splits
from experiments.bench.metering import meter
from experiments.bench.offline import predicted_figures, report, static_figures
from experiments.bench.operations import OPERATIONS, operation_of
from experiments.bench.operations.attention import lengths, split_bytes
from experiments.bench.schema import register
from experiments.bench.shapes import SHAPES
from experiments.bench.tables import _machine_code
from experiments.config import to_object
from experiments.gpu import GpuConfig
from experiments.results import AbsentError
from kernels.launch import TARGETS, num_kv_splits
from kernels.testing import attention_inputs, traffic_meter

ROOT = Path(__file__).resolve().parent.parent
GPU = GpuConfig("g", "sm_90", 100e12, 10e12, 1e9, 1e12, 1e10, 1e10)


def test_every_shape_has_an_operation_and_every_operation_a_shape() -> None:
    assert {type(shape) for shape in SHAPES.values()} == set(OPERATIONS)
    for name, shape in SHAPES.items():
        assert shape.name == name


# ---- costs, by hand


@pytest.mark.parametrize(
    ("config", "read", "written", "flops"),
    [
        # 2 sequences x 40 keys and values of 2 heads x 16 x 2 bytes; queries of 4 heads; 3 table
        # entries each; 4 FLOPs a head, lane and key.
        (
            DecodeConfig("", 2, 16, 16, Dtype.bf16, 2, 4, context_len=40),
            2 * (2 * 40 * 2 * 16 * 2 + 4 * 16 * 2 + 3 * 4),
            2 * 4 * 16 * 2,
            2 * 4 * 4 * 16 * 40,
        ),
        # fp8 keys and values, fp16 queries, a window of 10 tokens in 1 block.
        (
            DecodeConfig("", 2, 16, 16, Dtype.fp16, 1, 4, CacheDtype.fp8e4m3, 10, context_len=40),
            2 * 10 * 2 * 16 + 4 * 16 * 2 + 4,
            4 * 16 * 2,
            4 * 4 * 16 * 10,
        ),
        # Queries 5 to 7 of 8 tokens see 6, 7 and 8 keys.
        (
            PrefillConfig("", 1, 8, 4, Dtype.fp32, 1, 2, prompt_len=8, cached_len=5),
            2 * 8 * 8 * 4 + 3 * 2 * 8 * 4 + 2 * 4,
            3 * 2 * 8 * 4,
            4 * 2 * 8 * (6 + 7 + 8),
        ),
        # With a window of 4 they see 4 keys each, of the last 6.
        (
            PrefillConfig(
                "", 1, 8, 4, Dtype.fp32, 1, 2, CacheDtype.auto, 4, prompt_len=8, cached_len=5
            ),
            2 * 6 * 8 * 4 + 3 * 2 * 8 * 4 + 2 * 4,
            3 * 2 * 8 * 4,
            4 * 2 * 8 * 12,
        ),
        (MergeConfig("", 3, 5, 2, 8, Dtype.bf16), 3 * 10 * (16 + 4), 10 * (16 + 4), 0),
        (
            WriteConfig("", 2, 8, 16, Dtype.bf16, 5, CacheDtype.fp8e5m2),
            2 * 5 * 16 * 2 + 5 * 8,
            2 * 5 * 16,
            0,
        ),
        # Each source is read once; a block has 4 x 2 x 8 x 2 bytes, and there are 6 tensors.
        (CopyConfig("", 2, 8, 4, Dtype.bf16, 3, 5, 4), 6 * 5 * 128, 6 * 20 * 128, 0),
        (GatherConfig("", 2, 8, 4, Dtype.bf16, 3, 7), 6 * 7 * 128, 6 * 7 * 128, 0),
        (SwapConfig("", 2, 8, 4, Dtype.bf16, 3, 7), 6 * 7 * 128, 6 * 7 * 128, 0),
        # 2 full blocks of 16 tokens a prompt, its length and its root.
        (HashConfig("", 3, 40, 16), 3 * (2 * 64 + 12), 3 * 2 * 8, 0),
        # One cached block and the one that breaks the run; a row of two and a length are written.
        (MatchConfig("", 3, 40, 16, 16), 3 * (2 * 64 + (8 + 4 + 1 + 64) + 12), 3 * (8 + 4), 0),
        (
            MatchGatherConfig("", 2, 8, 16, Dtype.bf16, 3, 40, 16, 2),
            3 * (2 * 64 + (8 + 4 + 1 + 64) + 12) + 4 * 3 * 512,
            3 * (8 + 4) + 4 * 3 * 512,
            0,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, OperationConfig) else "",
)
def test_costs_are_counted_from_the_shapes(
    config: OperationConfig, read: int, written: int, flops: int
) -> None:
    cost = operation_of(config).cost(config)
    assert (cost.bytes_read, cost.bytes_written, cost.flops) == (read, written, flops)


def test_a_swap_crosses_the_bus_once() -> None:
    config = SHAPES["swap_out"]
    cost = operation_of(config).cost(config)
    assert cost.bytes_moved == cost.bytes_read == cost.bytes_written
    assert cost.link == "to_host"
    assert operation_of(SHAPES["swap_in"]).cost(SHAPES["swap_in"]).link == "from_host"


# ---- metered traffic


@pytest.mark.parametrize(
    ("config", "least", "most"),
    [
        (DecodeConfig("", batch_size=3, context_len=300), 1.0, 1.05),
        (DecodeConfig("", batch_size=3, context_len=300, block_size=1), 1.0, 1.05),
        (DecodeConfig("", context_len=300, sliding_window=100), 1.0, 1.05),
        (PrefillConfig("", prompt_len=200, cached_len=100), 1.0, 1.05),
        (PrefillConfig("", prompt_len=200, tile=TileConfig(16, 32, 4, 2)), 1.0, 1.05),
        (MergeConfig(""), 1.0, 1.05),
        (WriteConfig("", num_tokens=5), 1.0, 1.0),
        # A pair of ids and two addresses for each 8 KiB that a program copies.
        (CopyConfig("", fanout=1), 1.0, 1.01),
        # Each copy reads its source anew: 8 reads and writes where 1 read and 4 writes would do.
        (CopyConfig("", fanout=4), 1.6, 1.61),
        (CopyConfig("", fanout=32), 64 / 33, 64 / 33 + 0.01),
        (GatherConfig(""), 1.0, 1.01),
        (SwapConfig(""), 1.0, 1.01),
        (HashConfig(""), 1.0, 1.05),
        # Whole buckets of the index and whole tiles of blocks.
        (MatchConfig(""), 1.0, 2.0),
        (MatchGatherConfig(""), 1.0, 1.05),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, OperationConfig) else "",
)
def test_kernels_touch_what_they_need_and_little_else(
    config: OperationConfig, least: float, most: float
) -> None:
    assert least <= meter(config).ratio <= most


def test_a_cast_that_the_interpreter_makes_elsewhere_is_not_metered() -> None:
    assert meter(WriteConfig("", cache_dtype=CacheDtype.fp8e5m2)) is None


@pytest.mark.parametrize("num_splits", [2, 3])
def test_partial_results_are_counted_as_they_are_moved(num_splits: int) -> None:
    """What the formula says is what the meter finds beside queries, keys, values and tables."""
    from kernels.paged_attention import paged_attention

    config = DecodeConfig("", 2, 32, 16, Dtype.fp32, 1, 4, context_len=300)
    inputs = attention_inputs([300], [1], num_heads=4, num_kv_heads=2, head_size=32, block_size=16)
    out = inputs.query.clone()
    tables = (inputs.block_tables, inputs.seq_lens, inputs.query_start_loc)
    named = dict(zip(("tables", "lens", "starts"), tables, strict=True))
    with traffic_meter(
        query=inputs.query, key=inputs.key_cache, value=inputs.value_cache, out=out, **named
    ) as traffic:
        paged_attention(
            *(inputs.query, inputs.key_cache, inputs.value_cache, *tables),
            scale=1.0,
            out=out,
            max_query_len=1,
            num_splits=num_splits,
        )
    # The merge reads the log-sum-exps twice: once for their largest, once for the weights.
    lse_bytes = 4 * num_splits * 4
    moved = traffic.other_read + traffic.other_written
    assert moved == split_bytes(config, num_splits) + lse_bytes
    assert split_bytes(config, 1) == 0


def test_splits_are_those_of_the_launcher() -> None:
    """One long sequence is split over the device, many aren't, and a configured number stays."""
    target = TARGETS["sm_90"]
    single, many = SHAPES["decode_single"], SHAPES["decode"]
    assert launched_splits(single, target) == num_kv_splits(target, 8, 32768) > 1
    assert launched_splits(many, target) == 1
    assert launched_splits(dataclasses.replace(many, num_splits=5), target) == 5
    assert lengths(single) == (32768, 1)


# ---- compiled elsewhere


def test_what_is_compiled_is_what_would_be_launched() -> None:
    """The design's budget for decode; and a merge where keys are split."""
    (decode,) = compile_elsewhere(SHAPES["decode"], "sm_90")
    assert (decode.kernel, decode.target, decode.spilled_bytes) == ("paged_attention", "sm_90", 0)
    assert decode.instructions_per_token <= 28
    split = compile_elsewhere(SHAPES["decode_single"], "sm_90")
    assert [one.kernel for one in split] == ["paged_attention", "merge_states"]
    found = compile_elsewhere(SHAPES["prefix_hash_gather"], "sm_90")
    assert [one.kernel for one in found] == ["match_prefix", "copy_blocks"]


def test_a_configured_tile_is_the_one_that_is_compiled() -> None:
    tiles = [TileConfig(16, 32, 2, 2), TileConfig(16, 128, 4, 3)]
    small, large = (
        compile_elsewhere(dataclasses.replace(SHAPES["decode"], tile=tile), "sm_90")[0]
        for tile in tiles
    )
    assert (small.num_warps, large.num_warps) == (2, 4)
    assert small.shared_bytes < large.shared_bytes


# ---- rows


def test_a_row_has_code_traffic_and_prediction() -> None:
    shape = DecodeConfig("d", batch_size=2, context_len=3000)
    measured = report(BenchConfig(shape, gpu=GPU))
    metrics = measured.metrics
    cost = operation_of(shape).cost(shape)
    splits = launched_splits(shape, TARGETS["sm_90"])
    assert splits > 1
    touched = metrics["touched_over_needed"] * cost.bytes_moved + split_bytes(shape, splits)
    assert metrics["predicted_us"] == pytest.approx(touched / 1e12 * 1e6)
    assert metrics["predicted_us"] > metrics["predicted_flops_us"]
    assert measured.notes["shape"].startswith(
        "num_kv_heads=8 head_size=128 block_size=16 dtype=bf16"
    )
    assert measured.notes["kind"] == "predicted: nothing was timed"
    assert "context_len=200" in measured.notes["metered_shape"]


def test_what_does_not_fit_is_absent() -> None:
    """Nothing is predicted of a kernel that could not be launched."""
    shape = dataclasses.replace(SHAPES["prefill"], tile=TileConfig(128, 256, 8, 3))
    with pytest.raises(AbsentError, match=r"does not fit: \d+ bytes of shared memory, where sm_90"):
        report(BenchConfig(shape, gpu=GPU))


def test_what_a_target_cannot_do_is_absent() -> None:
    gpu = dataclasses.replace(GPU, target="sm_80")
    shape = DecodeConfig("d", cache_dtype=CacheDtype.fp8e4m3)
    with pytest.raises(AbsentError, match="sm_80 does not support fp8e4m3"):
        report(BenchConfig(shape, gpu=gpu))


# ---- the README's table


def readme_table(start: str = "| operation          |    MB |") -> list[dict[str, str]]:
    """The lines of one of the README's two tables, by its heads."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start = text.index(start)
    lines = text[start : text.index("\n\n", start)].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(cells[0], line, strict=True)) for line in cells[2:]]


def test_the_readme_s_predictions_are_the_code_s() -> None:
    """`make bench-offline` prints the table to put there."""
    register()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        names = [head.removesuffix(", us") for head in readme_table()[0] if head.endswith(", us")]
        gpus = {name: to_object(compose("bench", [f"gpu={name}"])).gpu for name in names}
    assert {gpu.target for gpu in gpus.values()} == set(TARGETS)
    table = {line["operation"]: line for line in readme_table()}
    assert list(table) == list(SHAPES)
    for name, shape in SHAPES.items():
        cost, ratio = operation_of(shape).cost(shape), meter(shape).ratio
        line = table[name]
        assert line["MB"] == f"{cost.bytes_moved / 1e6:,.4g}"
        assert line["GFLOP"] == (f"{cost.flops / 1e9:,.4g}" if cost.flops else "")
        assert line["touched / needed"] == f"{ratio:.3f}"
        for gpu in gpus.values():
            touched = ratio * cost.bytes_moved
            if isinstance(shape, DecodeConfig | PrefillConfig):
                touched += split_bytes(shape, launched_splits(shape, TARGETS[gpu.target]))
            figures = predicted_figures(cost, touched, gpu, Dtype.bf16)
            mark = "~" * figures["launch_bound"]
            assert line[f"{gpu.name}, us"] == f"{figures['predicted_us']:,.4g}{mark}"


def test_the_readme_s_machine_code_is_the_compiler_s() -> None:
    """For one target; nothing spills there."""
    for line in readme_table("| operation                                     |"):
        reports = compile_elsewhere(SHAPES[line["operation"].split(", ")[0]], "sm_90")
        assert not any(one.spilled_bytes for one in reports)
        figures = static_figures(reports) | {"launch_bound": 0}
        assert line["sm_90"] == _machine_code(figures)
