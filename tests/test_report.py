"""Tables, figures and the page: complete, in a stable order, readable by themselves."""

import re
import sys
from pathlib import Path

import pytest

from experiments import report
from experiments.plots import MAX_OCCUPANCY_PANELS, metric_figure, occupancy_figure
from experiments.ranges import InputError
from experiments.report import best_rows, results_table, write_report
from experiments.results import ResultsFolder, Row

SHOWN = {
    "rank_by": "output_tokens_per_s",
    "columns": ["output_tokens_per_s", "unheard_of", "seed"],
}
OCCUPANCY = {
    "time_s": [0.0, 5.0, 10.0],
    "in_use_blocks": [0, 50, 90],
    "cached_blocks": [0, 30, 10],
    "free_blocks": [100, 20, 0],
}


def make_row(name: str, swept: dict, metrics: dict, message: str = "", **more: object) -> Row:
    return {
        "config_hash": name,
        "swept": swept,
        "status": "failed" if message else "ok",
        "message": message,
        "metrics": metrics,
        "occupancy": {} if message else OCCUPANCY,
        "wall_s": 1.5,
        "seed": 7,
        "provenance": {"commit": "abc", "code_hash": "def"},
        "config": {group: {"name": f"a_{group}"} for group in ("workload", "model", "gpu")},
    } | more


def make_rows(*keys: str, levels: int = 2) -> list[Row]:
    """A full grid over `keys`, each with values 0 ... levels - 1."""
    points: list[dict] = [{}]
    for key in keys:
        points = [point | {key: value} for point in points for value in range(levels)]
    return [
        make_row(str(i), point, {"output_tokens_per_s": 1000.0 + i, "ttft_p50_s": 0.25 * i})
        for i, point in enumerate(points)
    ]


def make_folder(root: Path, rows: list[Row], **manifest: object) -> ResultsFolder:
    folder = ResultsFolder(root)
    swept = list(rows[0]["swept"]) if rows else []
    folder.claim(
        {
            "app": "serve",
            "swept_keys": swept,
            "fixed": {},
            "config": {"cache": {"block_size": 16}},
            "provenance": {"numpy": "2"},
            "shown": SHOWN,
        }
        | manifest
    )
    for row in rows:
        folder.write_row(row)
    return folder


def test_columns_stand_in_a_stable_order() -> None:
    """E09: swept keys, status, metrics as reported, provenance; whichever row failed."""
    rows = [
        make_row("1", {"a": 1}, {}, message="ValueError: no"),
        make_row("2", {"a": 2}, {"z_s": 1.0, "b_s": 2}),
    ]
    table = results_table(rows)
    assert list(table.columns) == [
        *("a", "status", "message", "z_s", "b_s", "wall_s", "workload", "model", "gpu"),
        *("seed", "commit", "code_hash", "config_hash"),
    ]
    assert table["z_s"].isna().tolist() == [True, False]
    assert "1,failed,ValueError: no,,,1.5," in table.to_csv(index=False)
    assert "2,ok,,1.0,2,1.5," in table.to_csv(index=False)
    assert table["gpu"].tolist() == ["a_gpu", "a_gpu"]


def test_the_best_rows_have_most_of_the_ranking_metric() -> None:
    rows = make_rows("a", levels=8)
    rows[3]["metrics"]["output_tokens_per_s"] = 5000.0
    rows[5] = make_row("5", {"a": 5}, {"output_tokens_per_s": 9e9}, message="broken")
    best = best_rows(results_table(rows), {"swept_keys": ["a"], "shown": SHOWN})
    assert best["a"].tolist() == [3, 7, 6, 4, 2]
    # What is the same everywhere would only widen the table.
    assert list(best.columns) == ["a", "output_tokens_per_s"]


def test_a_report_is_one_file_with_everything_in_it(tmp_path: Path) -> None:
    rows = [
        *make_rows("cache.block_size", "cache.watermark"),
        make_row("9", {"cache.block_size": 2, "cache.watermark": 0}, {}, message="E: <b>&"),
    ]
    for number, row in enumerate(rows[:4]):
        row["metrics"]["requests_refused"] = 42
        row["metrics"]["simulator_wall_s"] = 0.1 * number
        row["metrics"]["tpot_p50_s"] = float("nan")
    summary = write_report(make_folder(tmp_path / "out", rows))
    assert "best of 5 by output_tokens_per_s" in summary
    assert "failed: cache.block_size=2, cache.watermark=0: E: <b>&" in summary
    page = (tmp_path / "out" / "report.html").read_text()
    images = re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,[^"]{1000,}">', page)
    assert images == ["occupancy", "output_tokens_per_s", "ttft_p50_s"]
    assert not re.search(r"(src|href)=[\"']?(http|/|\.)", page)
    assert "E: &lt;b&gt;&amp;" in page
    assert "<b>" not in page
    assert "<td>requests_refused</td><td>42</td>" in page
    plots = {path.name for path in (tmp_path / "out" / "plots").iterdir()}
    assert plots == {"occupancy.png", "output_tokens_per_s.png", "ttft_p50_s.png"}
    assert (tmp_path / "out" / "results.csv").read_text().count("\n") == 6


def test_equal_rows_give_equal_files(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        write_report(make_folder(tmp_path / name, make_rows("a", "b")))
        paths = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]


def test_a_report_of_failures_alone_is_written(tmp_path: Path) -> None:
    rows = [make_row("1", {"a": 1}, {}, message="ValueError: no")]
    assert "no finished point" in write_report(make_folder(tmp_path / "out", rows))


def test_a_heat_map_shows_every_point_where_it_belongs() -> None:
    """Block size runs along x and watermark along y, whichever was swept first."""
    rows = make_rows("cache.watermark", "cache.block_size", levels=3)
    rows[5] = make_row("5", rows[5]["swept"], {}, message="failed")
    figure = metric_figure("ttft_p50_s", rows, ["cache.watermark", "cache.block_size"])
    axis = figure.axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("cache.block_size", "cache.watermark")
    assert axis.get_title() == "ttft_p50_s"
    texts = [text.get_text() for text in axis.texts]
    assert texts == ["0", "0.25", "0.5", "0.75", "1", "-", "1.5", "1.75", "2"]


def test_one_swept_key_gives_points_and_a_third_gives_panels() -> None:
    figure = metric_figure("ttft_p50_s", make_rows("a", levels=4), ["a"])
    (line,) = figure.axes[0].lines
    assert line.get_ydata() == pytest.approx([0, 0.25, 0.5, 0.75])
    keys = ["evictor", "cache.block_size", "cache.watermark"]
    figure = metric_figure("ttft_p50_s", make_rows(*keys), keys)
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert titles == ["ttft_p50_s\nevictor=0", "ttft_p50_s\nevictor=1"]


def test_occupancy_has_a_labelled_panel_a_point() -> None:
    keys = ["cache.block_size", "cache.watermark"]
    figure = occupancy_figure(make_rows(*keys), keys)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == [
        "block_size 0, watermark 0",
        "block_size 1, watermark 0",
        "block_size 0, watermark 1",
        "block_size 1, watermark 1",
    ]
    assert [text.get_text() for text in figure.legends[0].texts] == ["in use", "cached", "free"]
    assert figure.get_supxlabel() == "time, s"
    many = occupancy_figure(make_rows("a", levels=100), ["a"])
    assert sum(bool(axis.get_title()) for axis in many.axes) == MAX_OCCUPANCY_PANELS


def test_a_folder_without_rows_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="holds no rows yet"):
        write_report(make_folder(tmp_path / "out", []))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "elsewhere")])
    with pytest.raises(SystemExit, match=r"error: .*elsewhere holds no sweep\.json"):
        report.main()
