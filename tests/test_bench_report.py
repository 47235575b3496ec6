"""The report of `bench`: rooflines, what was not measured, and what can't be right."""

import itertools
import re
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from omegaconf import OmegaConf

from experiments import report
from experiments.bench.implementations import NAMES
from experiments.callbacks import Results
from experiments.plots import (
    LINE_COLORS,
    MARKERS,
    MAX_BARS,
    choose_axes,
    metric_figure,
    roofline_figure,
)
from experiments.report import best_rows, results_table, write_report
from experiments.results import ResultsFolder, Row

DEVICE = "NVIDIA H200"
MEASURED = {"kind": "measured", "clock": "graph", "target": "sm_90"}
PREDICTED = {"kind": "predicted: nothing was timed", "target": "sm_90"}
REHEARSED = {"kind": "rehearsal: its times mean nothing", "clock": "host"}
SHOWN = {"rank_by": "share_of_limit", "columns": ["p50_us", "share_of_limit", "predicted_us"]}


def timed(p50_us: float, flops: float, gbytes: float = 1.0, **more: float) -> dict[str, float]:
    """The metrics of a row that was measured on a GPU of 4,000 GB/s and 800 TFLOP/s."""
    return {
        "p20_us": 0.9 * p50_us,
        "p50_us": p50_us,
        "p80_us": 1.2 * p50_us,
        "samples": 20,
        "needed_bytes": int(gbytes * 1e9),
        "flops": int(flops),
        "intensity": flops / (gbytes * 1e9),
        "achieved_gb_per_s": gbytes / p50_us * 1e6,
        "achieved_tflop_per_s": flops / p50_us / 1e6,
        "share_of_limit": max(gbytes / 4e3, flops / 800e12) / p50_us * 1e6,
        "launch_bound": 0,
        "link_gb_per_s": 4000.0,
        "copy_gb_per_s": 3800.0,
        "matrix_tflop_per_s": 800.0,
        "empty_call_us": 2.0,
    } | more


def bench_row(swept: dict, metrics: dict, **more: object) -> Row:
    """A row of `bench`; its operation and implementation are the swept ones."""
    implementation = swept.get("implementation", "prefixlab")
    return {
        "config_hash": "-".join(["row", *map(str, swept.values())]),
        "swept": swept,
        "status": "ok",
        "message": "",
        "metrics": metrics,
        "notes": MEASURED,
        "device": DEVICE,
        "occupancy": {},
        "wall_s": 1.5,
        "seed": 0,
        "provenance": {"commit": "abc", "transformers": "absent"},
        "config": {
            "operation": {"name": swept.get("operation", "decode")},
            "implementation": implementation,
            "gpu": {"name": "h100"},
        },
    } | more


def not_ok(status: str, message: str, swept: dict, metrics: dict | None = None) -> Row:
    notes = {} if metrics is None else MEASURED
    return bench_row(swept, metrics or {}, status=status, message=message, notes=notes)


def write(root: Path, rows: list[Row]) -> tuple[str, str]:
    """(summary, page) of a folder with these rows."""
    folder = ResultsFolder(root)
    folder.claim(
        {
            "app": "bench",
            "swept_keys": list(rows[0]["swept"]),
            "config": {},
            "provenance": {},
            "shown": SHOWN,
        }
    )
    for row in rows:
        folder.write_row(row)
    return write_report(folder), (root / "report.html").read_text()


def by_block_size(values: dict[int, float], implementation: str = "prefixlab") -> list[Row]:
    return [
        bench_row(
            {"operation.block_size": size, "implementation": implementation}, timed(p50_us, 4e9)
        )
        for size, p50_us in values.items()
    ]


def test_notes_and_device_are_columns_after_the_metrics() -> None:
    rows = by_block_size({16: 300.0, 32: 280.0})
    rows[1] |= {"notes": {"kind": "measured", "clock": "stream", "version": "1.2"}}
    table = results_table(rows)
    columns = list(table.columns)
    start = columns.index("empty_call_us")
    added = ["device", "kind", "clock", "target", "version", "wall_s"]
    assert columns[start + 1 : start + 7] == added
    assert table["clock"].tolist() == ["graph", "stream"]
    assert table["device"].tolist() == [DEVICE, DEVICE]
    assert ",NVIDIA H200,measured,stream,,1.2,1.5," in table.to_csv(index=False)


def test_rows_without_notes_and_device_get_no_columns_for_them() -> None:
    rows = by_block_size({16: 300.0})
    for key in ("notes", "device"):
        del rows[0][key]
    assert not {"device", "kind"} & set(results_table(rows).columns)
    rows = [rows[0] | {"device": ""}]
    assert "device" not in results_table(rows)


def test_a_name_never_replaces_the_swept_value() -> None:
    row = bench_row({"operation": "decode block_size=8"}, {}, device="none")
    row["config"]["operation"]["name"] = "decode"
    table = results_table([row])
    assert table["operation"].tolist() == ["decode block_size=8"]
    assert table["implementation"].tolist() == ["prefixlab"]


def test_the_data_sheet_names_no_row_that_ran_on_a_device() -> None:
    """A row of an H200 with `gpu: h100` beside it would be taken for one of an H100."""
    assert "gpu" not in results_table(by_block_size({16: 1.0}))
    predicted = bench_row({"a": 1}, {"predicted_us": 1.0}, notes=PREDICTED, device="none")
    assert results_table([predicted])["gpu"].tolist() == ["h100"]


def test_suspect_rows_are_listed_and_kept_but_neither_ranked_nor_drawn(tmp_path: Path) -> None:
    rows = by_block_size({16: 300.0, 32: 280.0})
    swept = {"operation.block_size": 64, "implementation": "prefixlab"}
    rows.append(not_ok("suspect", "9e+09 GB/s is above the peak", swept, timed(1.0, 4e9)))
    summary, page = write(tmp_path / "out", rows)
    line = "operation.block_size=64, implementation=prefixlab: 9e+09 GB/s is above the peak"
    assert f"suspect: {line}" in summary
    assert f"<h2>Suspect points</h2><ul><li>{line}</li></ul>" in page
    best = best_rows(results_table(rows), {"swept_keys": ["operation.block_size"], "shown": SHOWN})
    assert best["operation.block_size"].tolist() == [32, 16]
    assert page.count("<tr class=suspect>") == 1
    assert (
        ",suspect,9e+09 GB/s is above the peak,0.9,1.0,1.2,"
        in (tmp_path / "out" / "results.csv").read_text()
    )


def test_suspect_numbers_appear_in_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, list[Row]] = {}
    rows = by_block_size({16: 300.0, 32: 280.0})
    swept = {"operation.block_size": 64, "implementation": "prefixlab"}
    rows.append(not_ok("suspect", "no", swept, timed(1.0, 4e9)))

    def metric(name: str, rows: list[Row], swept: list[str]) -> Figure:
        given[name] = rows
        return metric_figure(name, rows, swept)

    def roofline(rows: list[Row]) -> Figure:
        given["roofline"] = rows
        return roofline_figure(rows)

    monkeypatch.setattr(report, "metric_figure", metric)
    monkeypatch.setattr(report, "roofline_figure", roofline)
    write(tmp_path / "out", rows)
    assert {"p50_us", "roofline"} <= given.keys()
    for name, drawn in given.items():
        # The point keeps its place on the axis.
        assert [bool(row["metrics"]) for row in drawn] == [True, True, False], name


def test_absent_rows_are_one_line_a_reason(tmp_path: Path) -> None:
    rows = by_block_size({16: 300.0, 32: 280.0})
    for size, name in itertools.product((16, 32), ("vllm", "flashinfer")):
        swept = {"operation.block_size": size, "implementation": name}
        rows.append(not_ok("absent", f"{name} is not installed", swept))
    rows[-1]["message"] = "out of <memory>"
    summary, page = write(tmp_path / "out", rows)
    assert [line for line in summary.splitlines() if line.startswith("absent")] == [
        "absent: flashinfer is not installed (1 point)",
        "absent: vllm is not installed (2 points)",
        "absent: out of <memory> (1 point)",
    ]
    assert "<li>out of &lt;memory&gt; (1 point)</li>" in page
    assert page.count("<tr class=absent>") == 4
    assert "<h2>Failed" not in page


def test_without_any_finished_row_the_summary_says_why(tmp_path: Path) -> None:
    swept = {"operation": "decode", "implementation": "vllm"}
    rows = [not_ok("absent", "vllm is not installed", swept)]
    rows.append(not_ok("failed", "ValueError: no", swept | {"implementation": "prefixlab"}))
    summary, page = write(tmp_path / "out", rows)
    assert summary.splitlines()[:-1] == [
        "no finished point of 2",
        "failed: operation=decode, implementation=prefixlab: ValueError: no",
        "absent: vllm is not installed (1 point)",
    ]
    assert "<h2>No finished point of 2</h2>" in page
    assert "<img" not in page
    single, _ = write(tmp_path / "single", [not_ok("absent", "vllm is not installed", {})])
    assert single.startswith("absent: vllm is not installed (1 point)")
    numbers, _ = write(tmp_path / "suspect", [not_ok("suspect", "no", {}, timed(1.0, 4e9))])
    assert numbers.splitlines()[1] == "suspect: this run: no"


@pytest.mark.parametrize(
    ("status", "code"), [("ok", 0), ("absent", 0), ("suspect", 1), ("failed", 1)]
)
def test_failed_and_suspect_rows_decide_the_exit_status(
    tmp_path: Path, status: str, code: int
) -> None:
    rows = by_block_size({16: 300.0, 32: 280.0})
    rows[1] |= {"status": status, "message": "" if status == "ok" else "so"}
    write(tmp_path / "out", rows)
    config = {"hydra": {"mode": None, "run": {"dir": "out"}, "runtime": {"cwd": str(tmp_path)}}}
    ended = 0
    try:
        Results(**SHOWN).on_run_end(OmegaConf.create(config))
    except SystemExit as end:
        ended = end.code
    assert ended == code


def test_without_the_ranking_metric_all_rows_stand_in_swept_order(tmp_path: Path) -> None:
    """Predicted rows have no share_of_limit: five arbitrary ones were called the best by it."""
    rows = [
        bench_row({"gpu": name}, {"predicted_us": us}, notes=PREDICTED, device="none")
        for name, us in zip("abcdefg", (5.0, 1.0, 4.0, 2.0, 7.0, 6.0, 3.0), strict=True)
    ]
    summary, page = write(tmp_path / "out", rows)
    assert "best of" not in summary
    lines = summary.splitlines()
    assert lines[1] == "7 finished of 7 points:"
    assert [line.split() for line in lines[2:-1]] == [
        ["gpu", "predicted_us"],
        *([name, us] for name, us in zip("abcdefg", "5142763", strict=True)),
    ]
    assert "<h2>7 finished of 7 points</h2>" in page
    many = [bench_row({"a": i}, {"predicted_us": float(i)}, notes=PREDICTED) for i in range(101)]
    summary, _ = write(tmp_path / "many", many)
    assert "101 finished of 101 points, the first 100:" in summary
    assert len(summary.splitlines()) == 104


def test_a_lone_finished_row_shows_its_figures() -> None:
    rows = by_block_size({16: 300.0})
    rows.append(not_ok("absent", "no", {"operation.block_size": 32, "implementation": "vllm"}))
    best = best_rows(results_table(rows), {"swept_keys": ["implementation"], "shown": SHOWN})
    assert list(best.columns) == ["implementation", "p50_us", "share_of_limit"]


def test_the_page_and_the_summary_begin_with_what_the_numbers_are(tmp_path: Path) -> None:
    predicted = bench_row({"a": 1}, {"predicted_us": 1.0}, notes=PREDICTED, device="none")
    summary, page = write(tmp_path / "predicted", [predicted])
    first = "Predicted: nothing was timed. Device: none."
    assert summary.startswith(first)
    assert f"<body><p class=kind>{first}</p><h1>" in page
    assert "implementation prefixlab, gpu h100, seed 0" in page
    measured = bench_row({"a": 2}, timed(300.0, 4e9))
    rehearsed = [bench_row({"a": i}, timed(300.0, 4e9), notes=REHEARSED) for i in (3, 4)]
    _, page = write(tmp_path / "measured", [measured])
    assert f"<body><p class=kind>Measured. Device: {DEVICE}.</p><h1>" in page
    _, page = write(tmp_path / "all", [predicted, measured, *rehearsed])
    assert re.findall("<p class=kind>(.*?)</p>", page) == [
        f"{first} (1 point)",
        f"Measured. Device: {DEVICE}. (1 point)",
        f"Rehearsal: its times mean nothing. Device: {DEVICE}. (2 points)",
    ]


def test_rows_of_several_kinds_are_told_apart_in_the_table_of_the_best() -> None:
    rows = by_block_size({16: 300.0, 32: 280.0})
    rows[1] |= {"notes": REHEARSED, "device": "Triton's interpreter"}
    best = best_rows(results_table(rows), {"swept_keys": ["operation.block_size"], "shown": SHOWN})
    assert best["kind"].tolist() == [REHEARSED["kind"], "measured"]
    assert best["device"].tolist() == ["Triton's interpreter", DEVICE]


def test_figures_of_what_was_not_measured_say_so() -> None:
    rows = by_block_size({16: 300.0, 32: 280.0})
    swept = list(rows[0]["swept"])
    for figure in (roofline_figure(rows), metric_figure("p50_us", rows, swept)):
        assert figure.get_suptitle() == ""
    rows[1]["notes"] = REHEARSED
    for figure in (roofline_figure(rows), metric_figure("p50_us", rows, swept)):
        assert figure.get_suptitle() == "rehearsal: its times mean nothing"


def suite_rows() -> list[Row]:
    """Two operations that compute and two that move, by two implementations each."""
    metrics = {
        "decode": lambda f: timed(300.0 * f, 4e9),
        "merge_states": lambda f: timed(4.0 * f, 1e8, 0.01, launch_bound=1),
        "copy_blocks": lambda f: timed(320.0 * f, 0),
        "swap_out": lambda f: timed(20000.0 * f, 0, link_gb_per_s=55.0),
    }
    return [
        bench_row({"operation": name, "implementation": by}, metrics[name](factor))
        for name, (by, factor) in itertools.product(
            metrics, (("prefixlab", 1.0), ("torch_ops", 2.0))
        )
    ]


def points_of(axis: Axes) -> list[Line2D]:
    return [line for line in axis.lines if line.get_linestyle() == "None"]


def lines_of(axis: Axes) -> list[Line2D]:
    return [line for line in axis.lines if line.get_linestyle() != "None"]


def test_a_roofline_has_every_computing_row_under_its_ceilings() -> None:
    axis, _ = roofline_figure(suite_rows()).axes
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("FLOPs a byte", "achieved TFLOP/s")
    drawn = [
        (point.get_marker(), to_hex(point.get_color()), point.get_markerfacecolor() == "none")
        for point in points_of(axis)
    ]
    assert drawn == [
        (MARKERS[0], LINE_COLORS[0], False),
        (MARKERS[0], LINE_COLORS[1], False),
        (MARKERS[1], LINE_COLORS[0], True),
        (MARKERS[1], LINE_COLORS[1], True),
    ]
    x, y = points_of(axis)[1].get_data()
    assert (x[0], y[0]) == (pytest.approx(4.0), pytest.approx(4e9 / 600e-6 / 1e12))
    slanted, level = lines_of(axis)
    # 4,000 GB/s at 200 FLOPs a byte are 800 TFLOP/s: there the lines meet.
    assert slanted.get_ydata() == pytest.approx(4.0 * slanted.get_xdata())
    assert (slanted.get_xdata()[1], slanted.get_ydata()[1]) == (200.0, 800.0)
    assert (level.get_xdata()[0], *level.get_ydata()) == (200.0, 800.0, 800.0)
    assert [text.get_text() for text in axis.texts] == ["4,000 GB/s", "800 TFLOP/s"]


def test_each_distinct_ceiling_is_drawn_once() -> None:
    """Two processes never measure quite the same; fp32 has another rate altogether."""
    rows = by_block_size({8: 300.0, 16: 290.0, 32: 280.0})
    rows[1]["metrics"] |= {"matrix_tflop_per_s": 795.0, "link_gb_per_s": 4020.0}
    rows[2]["metrics"] |= {"matrix_tflop_per_s": 52.0}
    (axis,) = roofline_figure(rows).axes
    texts = [text.get_text() for text in axis.texts]
    assert texts == ["4,020 GB/s", "800 TFLOP/s", "52 TFLOP/s"]
    assert len(lines_of(axis)) == 3


def test_rows_that_only_move_bytes_are_bars_beside_their_ceiling() -> None:
    _, axis = roofline_figure(suite_rows()).axes
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == [
        "copy_blocks, prefixlab",
        "copy_blocks, torch_ops",
        "swap_out, prefixlab",
        "swap_out, torch_ops",
    ]
    widths = [bar.get_width() for bar in axis.patches]
    assert widths == pytest.approx([3125.0, 1562.5, 50.0, 25.0])
    assert [point.get_xdata()[0] for point in points_of(axis)] == [4000.0, 4000.0, 55.0, 55.0]
    assert [text.get_text() for text in axis.texts][2] == "50 of 55"
    rows = [
        bench_row({"operation.fanout": fanout, "seed": 1}, timed(300.0, 0)) for fanout in (2, 4)
    ]
    for row in rows:
        row["config"]["operation"]["name"] = "copy_blocks"
    (axis,) = roofline_figure(rows).axes
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["copy_blocks, prefixlab, fanout 2", "copy_blocks, prefixlab, fanout 4"]


def test_too_many_bars_are_cut_and_said_to_be() -> None:
    rows = [bench_row({"a": i}, timed(300.0, 0)) for i in range(MAX_BARS + 5)]
    (axis,) = roofline_figure(rows).axes
    assert len(axis.patches) == MAX_BARS
    assert axis.get_title().endswith(f", the first {MAX_BARS} of {MAX_BARS + 5}")


def test_the_legend_of_a_roofline_stands_outside() -> None:
    rows = suite_rows()
    absent = {"operation": "decode", "implementation": "flashinfer"}
    figure = roofline_figure([not_ok("absent", "no", absent), *rows])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == [
        *("prefixlab", "torch_ops", "decode", "merge_states"),
        *("measured rate of the link", "hollow: launch-bound"),
    ]
    figure.draw_without_rendering()
    left = legend.get_window_extent().x0
    assert all(axis.get_window_extent().x1 < left for axis in figure.axes)


def test_a_page_has_a_roofline_where_rows_were_timed(tmp_path: Path) -> None:
    _, page = write(tmp_path / "out", suite_rows())
    assert re.search(r'<h2>Roofline</h2><img alt="roofline"', page)
    _, page = write(tmp_path / "single", [bench_row({}, timed(300.0, 4e9))])
    assert '<img alt="roofline"' in page
    predicted = bench_row({"a": 1}, {"intensity": 4.0, "flops": 8}, notes=PREDICTED)
    _, page = write(tmp_path / "predicted", [predicted])
    assert "Roofline" not in page


def test_ceilings_and_counts_are_in_the_table_and_not_drawn(tmp_path: Path) -> None:
    rows = by_block_size({16: 300.0, 32: 280.0})
    # All of them differ between the rows.
    rows[1]["metrics"] = {name: 1.01 * value for name, value in rows[1]["metrics"].items()}
    rows[1]["metrics"] |= {"launch_bound": 1}
    write(tmp_path / "out", rows)
    assert {path.stem for path in (tmp_path / "out" / "plots").iterdir()} == {
        *("roofline", "p50_us", "achieved_gb_per_s", "achieved_tflop_per_s", "share_of_limit"),
    }
    header = (tmp_path / "out" / "results.csv").read_text().splitlines()[0].split(",")
    assert {"samples", "p20_us", "link_gb_per_s", "launch_bound"} <= set(header)


def test_what_the_compiler_counts_is_in_the_table_and_not_drawn(tmp_path: Path) -> None:
    counted = {"loads_16_bytes", "async_16_bytes", "matrix_instructions", "limit_us"}
    counted.add("launch_bound")
    rows = [
        bench_row({"a": i}, dict.fromkeys([*counted, "registers"], i), notes=PREDICTED)
        for i in (1, 0)
    ]
    write(tmp_path / "out", rows)
    assert [path.stem for path in (tmp_path / "out" / "plots").iterdir()] == ["registers"]
    header = (tmp_path / "out" / "results.csv").read_text().splitlines()[0].split(",")
    assert counted < set(header)


def tile_rows() -> list[Row]:
    """As of tile_choice: prefill takes ten times as long as decode."""
    sizes = {"m": (16, 64), "n": (32, 64), "num_warps": (2, 4), "num_stages": (2, 3)}
    rows = []
    for i, (name, *tile) in enumerate(itertools.product(("decode", "prefill"), *sizes.values())):
        swept = {f"operation.tile.{key}": size for key, size in zip(sizes, tile, strict=True)}
        p50_us = (300.0 if name == "decode" else 3000.0) + i % 16
        rows.append(bench_row({"operation": name} | swept, timed(p50_us, 4e9)))
    return rows


def panels_of(figure: Figure) -> list[Axes]:
    return [axis for axis in figure.axes if axis.images]


def test_maps_of_different_operations_have_scales_of_their_own() -> None:
    """On one scale, each panel of tile_choice had a single color."""
    rows = tile_rows()
    panels = panels_of(metric_figure("p50_us", rows, list(rows[0]["swept"])))
    assert len(panels) == 8
    for axis in panels:
        low = 300.0 if axis.get_title().endswith("operation=decode") else 3000.0
        assert axis.images[0].get_clim() == (low, low + 15)
        assert not isinstance(axis.images[0].norm, LogNorm)
    # Where operations are an axis of the map, they are compared.
    suite = suite_rows()
    (axis,) = panels_of(metric_figure("p50_us", suite, list(suite[0]["swept"])))
    assert axis.images[0].get_clim() == (4.0, 40000.0)


def test_titles_of_panels_are_short_and_stay_within_theirs() -> None:
    rows = tile_rows()
    for row in rows:
        row["swept"] |= {"gpu.memory_bytes_per_s": 123456789000.0, "seed": 12345678}
    swept = list(rows[0]["swept"])
    figure = metric_figure("p50_us", rows, swept)
    titles = [axis.get_title() for axis in panels_of(figure)]
    assert titles[0].splitlines() == [
        "p50_us",
        "num_warps=2, num_stages=2,",
        "memory_bytes_per_s=123456789000.0,",
        "seed=12345678, operation=decode",
    ]
    figure.draw_without_rendering()
    boxes = [axis.title.get_window_extent() for axis in panels_of(figure)]
    for left, right in itertools.pairwise(boxes[:3]):
        assert left.x1 < right.x0
    assert all(figure.bbox.x0 < box.x0 and box.x1 < figure.bbox.x1 for box in boxes)
    # Of two keys that end in the same, the last part would not tell which.
    points = itertools.product((1, 2), (1, 2), "ab", "cd")
    keys = ["x", "y", "model", "cache.model"]
    rows = [bench_row(dict(zip(keys, point, strict=True)), {"z": 1.0}) for point in points]
    title = panels_of(metric_figure("z", rows, keys))[0].get_title()
    assert title == "z\nmodel=a, cache.model=c"


def test_a_map_of_the_fixed_set_has_its_numbers_and_a_natural_order() -> None:
    """Sizes stood as 1, 128, 256, 32, and 182 cells without numbers."""
    sizes = [f"decode block_size={size}" for size in (1, 8, 16, 32, 128, 256)]
    others = [f"other_{letter}" for letter in "abcdefghijklmnopqrs"]
    labels = ["copy_blocks", "decode", *sizes, "decode_fp8", *others]
    rows = [
        bench_row({"operation": label, "implementation": by}, timed(12345.0, 4e9))
        for label, by in itertools.product(sorted(labels), "abcdefg")
    ]
    figure = metric_figure("p50_us", rows, ["operation", "implementation"])
    (axis,) = panels_of(figure)
    assert [label.get_text() for label in axis.get_yticklabels()] == labels
    assert [text.get_text() for text in axis.texts] == ["12,345"] * 7 * len(labels)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axis.texts[:7]]
    for left, right in itertools.pairwise(boxes):
        assert left.x1 < right.x0


def colors_of_roofline(names: list[str]) -> dict[str, str]:
    rows = [bench_row({"implementation": name}, timed(3.0, 4e9)) for name in names]
    handles = roofline_figure(rows).legends[0].legend_handles
    colors = {handle.get_label(): to_hex(handle.get_color()) for handle in handles}
    return {name: colors[name] for name in names}


def colors_of(axis: Axes) -> list[str]:
    return [to_hex(bars.lines[0].get_color()) for bars in axis.containers]


def test_an_implementation_has_the_color_of_the_roofline_as_a_point_and_as_a_line() -> None:
    """Whatever else there is in the rows, and in a panel that lacks another one."""
    names = ["vllm", "torch_ops", "prefixlab", "mine"]
    colors = list(colors_of_roofline(names).values())
    assert len(set(colors)) == len(names)
    rows = [bench_row({"implementation": name}, timed(3.0, 4e9)) for name in names]
    (axis,) = metric_figure("p50_us", rows, ["implementation"]).axes
    assert colors_of(axis) == colors
    keys = ["size", "implementation", "operation"]
    rows = [
        bench_row(dict(zip(keys, point, strict=True)), timed(3.0, 4e9))
        for point in itertools.product((1, 2), names, ("decode", "prefill"))
        if point[1:] != ("vllm", "prefill")
    ]
    decode, prefill = metric_figure("p50_us", rows, keys).axes
    assert (colors_of(decode), colors_of(prefill)) == (colors, colors[1:])
    alone = by_block_size({16: 300.0, 32: 280.0}, "torch_ops")
    (axis,) = metric_figure("p50_us", alone, ["operation.block_size"]).axes
    assert colors_of(axis) == [colors[1]] == [*colors_of_roofline(["torch_ops"]).values()]


def test_every_implementation_has_a_color_of_its_own() -> None:
    assert len(set(colors_of_roofline(NAMES).values())) == len(NAMES)


def test_implementations_are_lines_over_the_number_that_is_swept() -> None:
    rows = by_block_size({8: 10.0, 16: 200.0})
    rows += by_block_size({8: 20.0, 16: 400.0}, "torch_ops")
    rows.append(not_ok("absent", "no", {"operation.block_size": 8, "implementation": "vllm"}))
    rows = [row | {"swept": dict(reversed(row["swept"].items()))} for row in rows]
    figure = metric_figure("p50_us", rows, ["implementation", "operation.block_size"])
    (axis,) = figure.axes
    assert axis.get_xlabel() == "operation.block_size"
    legend = axis.get_legend()
    assert legend.get_title().get_text() == "implementation"
    # Who has no point has no line.
    assert [text.get_text() for text in legend.texts] == ["prefixlab", "torch_ops"]
    assert axis.get_title() == "p50_us, bars from p20_us to p80_us"
    assert axis.get_yscale() == "log"
    bars = axis.containers[0]
    assert bars.lines[0].get_ydata() == pytest.approx([10.0, 200.0])
    (segments,) = bars.lines[2]
    spans = [tuple(segment[:, 1]) for segment in segments.get_segments()]
    assert spans == [pytest.approx((9.0, 12.0)), pytest.approx((180.0, 240.0))]


@pytest.mark.parametrize(
    ("swept", "axes"),
    [
        (
            {"batch_size": (1, 8), "context_len": (512, 2048), "implementation": "ab"},
            ["batch_size", "implementation", "context_len"],
        ),
        (
            {"operation": "de", "num_blocks": (1, 8), "implementation": "ab"},
            ["num_blocks", "implementation", "operation"],
        ),
        ({"operation": "de", "implementation": "ab"}, ["implementation", "operation"]),
        ({"operation": "de", "gpu": "gh"}, ["gpu", "operation"]),
        ({"operation": "de", "m": (16, 64), "n": (32, 64)}, ["m", "n", "operation"]),
        ({"implementation": "ab"}, ["implementation"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_compared_shares_a_panel(swept: dict, axes: list[str]) -> None:
    points = [
        dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())
    ]
    rows = [bench_row(point, {"x": float(i)}) for i, point in enumerate(points)]
    assert choose_axes(list(swept), rows) == axes


def test_panels_of_lines_share_their_scale_and_empty_ones_are_left_out() -> None:
    rows = [
        bench_row({"batch": batch, "implementation": by, "length": length}, {"x": float(length)})
        for batch, by, length in itertools.product((1, 8), "ab", (512, 2048, 8192))
    ]
    for row in rows:
        if row["swept"]["length"] == 512:
            row["metrics"] = {}
    figure = metric_figure("x", rows, ["batch", "implementation", "length"])
    assert [axis.get_title() for axis in figure.axes] == ["x\nlength=2048", "x\nlength=8192"]
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim()
    assert [len(axis.lines) for axis in figure.axes] == [2, 2]


@pytest.mark.parametrize(
    ("metric", "values", "is_log"),
    [
        ("p50_us", (1.0, 10.5), True),
        ("p50_us", (1.0, 9.5), False),
        ("ttft_p50_s", (0.1, 2.0), True),
        ("ttft_p50_s", (0.0, 2.0), False),
        ("tokens_per_s", (1.0, 100.0), False),
    ],
)
def test_times_over_more_than_a_decade_are_drawn_logarithmically(
    metric: str, values: tuple[float, float], is_log: bool
) -> None:
    rows = [bench_row({"a": i}, {metric: value}) for i, value in enumerate(values)]
    assert (metric_figure(metric, rows, ["a"]).axes[0].get_yscale() == "log") is is_log
    maps = [row | {"swept": row["swept"] | {"b": 0}} for row in rows]
    (image,) = metric_figure(metric, maps, ["a", "b"]).axes[0].images
    assert isinstance(image.norm, LogNorm) is is_log


@pytest.mark.parametrize(
    ("names", "rotation"),
    [(["a100_80g", "a40"], 0), (["a100_80g", "a40", "h100", "rtx_pro_6000", "mi300x"], 45)],
)
def test_long_names_are_written_aslant(names: list[str], rotation: float) -> None:
    rows = [
        bench_row({"gpu": gpu, "operation": operation}, {"x": 1.0})
        for gpu, operation in itertools.product(names, ("decode", "prefill"))
    ]
    for swept in (["gpu", "operation"], ["gpu"]):
        axis = metric_figure("x", rows, swept).axes[0]
        assert [label.get_text() for label in axis.get_xticklabels()] == names
        assert {label.get_rotation() for label in axis.get_xticklabels()} == {rotation}


def test_equal_rows_give_equal_bench_reports(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        write(tmp_path / name, suite_rows())
        paths = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]
