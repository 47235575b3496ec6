"""From rows to what a person reads: results.csv, plots and one self-contained report.html.

    python -m experiments.report DIR

rebuilds all three from the rows of a run or a sweep; nothing is measured again.
"""

import argparse
import base64
import html
import io
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from .plots import (
    CAPACITY_KEYS,
    capacity_figure,
    metric_figure,
    occupancy_figure,
    roofline_figure,
)
from .ranges import InputError
from .results import ResultsFolder, Row, write_whole

NUM_BEST_ROWS = 5
MAX_UNRANKED_ROWS = 100
NAMED = ("workload", "prompts", "model", "operation", "implementation", "gpu")
NOT_DRAWN = (
    *("p20_us", "p80_us"),  # they stand as a range around p50_us
    *("samples", "needed_bytes", "flops", "intensity", "launch_bound", "limit_us"),
    *("loads_16_bytes", "async_16_bytes", "matrix_instructions"),
    *("link_gb_per_s", "copy_gb_per_s", "matrix_tflop_per_s", "empty_call_us"),
)
"""Metrics that say how, or on what, others were measured: in the table, but no figures."""
WIDE_FIGURES = {
    "roofline": "Roofline",
    "capacity_curve": "Hit rate over capacity",
    "occupancy": "Pool occupancy over time",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2em auto;
       padding: 0 1em; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 3px 9px; text-align: right; border-bottom: 1px solid #ddd;
         font-variant-numeric: tabular-nums; white-space: nowrap; }
th { background: #f3f3f3; } tr.failed td { background: #fde8e6; }
tr.suspect td { background: #fdf1cf; } tr.absent td { color: #999; }
.kind { font-size: 20px; font-weight: bold; background: #fdf1cf; padding: 0.5em 1em; }
.wide { overflow-x: auto; } .maps img { width: 49%; } img { max-width: 100%; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 12px; }
"""


def results_table(rows: list[Row]) -> pd.DataFrame:
    """One line a row: swept keys, status, message, metrics, notes, then what produced the row.

    Metrics stand in the order in which they were reported; a failed row's are empty. Columns with
    "wall" in their name hold real time and differ from run to run.
    """
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    notes = list(dict.fromkeys(name for row in rows for name in _notes(row)))
    lines = [
        {
            **row["swept"],
            "status": row["status"],
            "message": row["message"],
            **{name: row["metrics"].get(name) for name in metrics},
            **{name: _notes(row).get(name) for name in notes},
            "wall_s": row["wall_s"],
            **_names(row),
            "seed": row["seed"],
            **row["provenance"],
            "config_hash": row["config_hash"],
        }
        # A name never takes the place of the swept value that it stands for.
        | row["swept"]
        for row in rows
    ]
    # A column with a gap would otherwise turn its whole numbers into floats.
    return pd.DataFrame(lines, dtype=object)


def write_report(folder: ResultsFolder) -> str:
    """Write results.csv, plots/*.png and report.html into the folder; return a short summary.

    Raises InputError where the folder holds no rows.
    """
    manifest, rows = folder.manifest(), folder.rows()
    if not rows:
        raise InputError(f"{folder.root} holds no rows yet")
    table = results_table(rows)
    write_whole(folder.root / "results.csv", table.to_csv(index=False).encode())
    best = best_rows(table, manifest)
    figures, constant = _figures(rows, manifest["swept_keys"])
    images = {name: _png(figure) for name, figure in figures.items()}
    for name, image in images.items():
        write_whole(folder.root / "plots" / f"{name}.png", image)
    page = _page(manifest, rows, table, best, constant, images)
    report = folder.root / "report.html"
    write_whole(report, page.encode())
    lines = _kinds(rows)
    if manifest["swept_keys"]:
        lines += [_heading(table, manifest), *([] if best.empty else [_text(best)])]
    elif rows[0]["status"] == "ok":
        lines += [f"{name}: {_cell(value)}" for name, value in rows[0]["metrics"].items()]
    problems = [line for listed in _problems(rows).values() for line in listed]
    return "\n".join([*lines, *problems, f"report: {report}"])


def best_rows(table: pd.DataFrame, manifest: dict) -> pd.DataFrame:
    """The rows with most of the ranking metric, or where none has it all in swept order.

    Columns: swept keys and, of those to be shown, the ones that differ between rows.
    """
    shown = manifest["shown"]
    finished = table[table["status"] == "ok"]
    columns = [*manifest["swept_keys"]]
    for name in ("kind", "device", *shown["columns"]):
        if name not in table or name in columns:
            continue
        # One row differs from none: it shows what it has, but not what its header says.
        alone = len(finished) == 1 and name in shown["columns"] and finished[name].notna().all()
        if alone or finished[name].nunique(dropna=False) > 1:
            columns.append(name)
    if not _is_ranked(table, manifest):
        return finished[columns].head(MAX_UNRANKED_ROWS)
    # A stable sort keeps equal rows in the order of their swept keys.
    finished = finished.sort_values(shown["rank_by"], ascending=False, kind="stable")
    return finished[columns].head(NUM_BEST_ROWS)


def _is_ranked(table: pd.DataFrame, manifest: dict) -> bool:
    """Whether any finished row has the ranking metric."""
    rank_by = manifest["shown"]["rank_by"]
    return rank_by in table and bool(table[table["status"] == "ok"][rank_by].notna().any())


def _heading(table: pd.DataFrame, manifest: dict) -> str:
    """What stands above the best rows."""
    finished = int((table["status"] == "ok").sum())
    if not finished:
        return f"no finished point of {len(table)}"
    if _is_ranked(table, manifest):
        tried = int((table["status"] != "absent").sum())
        return f"best of {tried} by {manifest['shown']['rank_by']}:"
    first = f", the first {MAX_UNRANKED_ROWS}" if finished > MAX_UNRANKED_ROWS else ""
    return f"{finished} finished of {_points(len(table))}{first}:"


def _kinds(rows: list[Row]) -> list[str]:
    """What the numbers are, a line a kind and device, so that none are taken for measured ones."""
    kinds = Counter(
        (row["notes"]["kind"], row.get("device")) for row in rows if "kind" in row.get("notes", {})
    )
    return [
        f"{kind[0].upper()}{kind[1:]}."
        # A GPU beside the CPU that did the work has no part in it.
        + ("" if kind.endswith("on the CPU") else f" Device: {device or 'none'}.")
        + (f" ({_points(count)})" if len(kinds) > 1 else "")
        for (kind, device), count in kinds.items()
    ]


def _problems(rows: list[Row]) -> dict[str, list[str]]:
    """By status, a line a failed or suspect point, and one for all absent for the same reason."""
    problems = {
        status: [
            f"{status}: {_swept_text(row)}: {row['message']}"
            for row in rows
            if row["status"] == status
        ]
        for status in ("failed", "suspect")
    }
    absent = Counter(row["message"] for row in rows if row["status"] == "absent")
    listed = [f"absent: {message} ({_points(count)})" for message, count in absent.items()]
    return problems | {"absent": listed}


def _points(count: int) -> str:
    return f"{count} point" if count == 1 else f"{count} points"


def _figures(rows: list[Row], swept: list[str]) -> tuple[dict[str, Figure], dict[str, float]]:
    """Figures by file name, and the metrics that are the same in all rows and need none.

    Wall times get none either: they say how busy this machine was.
    """
    finished = [row for row in rows if row["status"] == "ok"]
    # Numbers that can't be right leave a gap where they would have been drawn.
    drawn = [row if row["status"] == "ok" else row | {"metrics": {}} for row in rows]
    figures, constant = {}, {}
    if any("achieved_tflop_per_s" in row["metrics"] for row in finished):
        figures["roofline"] = roofline_figure(drawn)
    if set(swept) == CAPACITY_KEYS and any("block_hit_rate" in r["metrics"] for r in finished):
        figures["capacity_curve"] = capacity_figure(finished)
    names = dict.fromkeys(name for row in finished for name in row["metrics"])
    # A metric that only repeats a swept key, such as the size of the pool, says nothing more.
    repeated = {key.rpartition(".")[2] for key in swept}
    for metric in [name for name in names if "wall" not in name and name not in repeated]:
        values = [row["metrics"].get(metric) for row in finished]
        # Compared as text, because NaN (no request finished) doesn't equal itself.
        if len(set(map(str, values))) == 1:
            constant[metric] = values[0]
        elif metric not in NOT_DRAWN:
            figures[metric] = metric_figure(metric, drawn, swept)
    with_series = [row for row in finished if row["occupancy"]]
    if with_series:
        figures["occupancy"] = occupancy_figure(with_series, swept)
    return figures, constant


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the version that matplotlib writes by default, equal rows give equal files.
    figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    return buffer.getvalue()


def _page(
    manifest: dict,
    rows: list[Row],
    table: pd.DataFrame,
    best: pd.DataFrame,
    constant: dict[str, float],
    images: dict[str, bytes],
) -> str:
    swept, app = manifest["swept_keys"], _escape(manifest["app"])
    names = ", ".join(f"{group} {_escape(name)}" for group, name in _common_names(rows).items())
    parts = [
        *(f"<p class=kind>{_escape(line)}</p>" for line in _kinds(rows)),
        f"<h1>{app}: {' &times; '.join(map(_escape, swept)) or 'one run'}</h1>",
        f"<p>{f'{names}, ' if names else ''}seed {rows[0]['seed']}; rows: {len(rows)}.</p>",
    ]
    if swept:
        levels = {key: dict.fromkeys(str(row["swept"][key]) for row in rows) for key in swept}
        items = (f"<li>{_escape(key)}: {_escape(', '.join(v))}</li>" for key, v in levels.items())
        parts.append(f"<ul>{''.join(items)}</ul>")
        heading = _heading(table, manifest).rstrip(":")
        parts.append(f"<h2>{_escape(heading[0].upper() + heading[1:])}</h2>")
        parts.append("" if best.empty else _html_table(best))
    for status, listed in _problems(rows).items():
        if listed:
            items = (f"<li>{_escape(line.removeprefix(f'{status}: '))}</li>" for line in listed)
            parts.append(f"<h2>{status.capitalize()} points</h2><ul>{''.join(items)}</ul>")
    for name, heading in WIDE_FIGURES.items():
        if name in images:
            parts.append(f"<h2>{heading}</h2>" + _image(name, images))
    maps = [name for name in images if name not in WIDE_FIGURES]
    if maps:
        parts.append("<h2>Metrics</h2><div class=maps>")
        parts += [_image(name, images) for name in maps]
        parts.append("</div>")
    if constant:
        heading = "Metrics that are the same at every point" if swept else "Metrics"
        listed = pd.DataFrame({"metric": constant.keys(), "value": constant.values()})
        parts.append(f"<h2>{heading}</h2>{_html_table(listed)}")
    shown = table.drop(columns=[*rows[0]["provenance"], "config_hash"])
    parts.append(f"<h2>All rows</h2><div class=wide>{_html_table(shown)}</div>")
    made_by = {
        key: ", ".join(dict.fromkeys(row["provenance"][key] for row in rows))
        for key in rows[0]["provenance"]
    }
    details = _escape(_indented({"configuration": manifest["config"], "made by": made_by}))
    parts.append(f"<h2>Base configuration and versions</h2><pre>{details}</pre>")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{app}</title>"
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>"
    )


def _names(row: Row) -> dict[str, str]:
    """The names of what was run, by config group."""
    chosen = {group: row["config"][group] for group in NAMED if group in row["config"]}
    if row.get("device", "") not in ("", "none"):
        # It ran on this device, not on the one of the data sheet.
        chosen.pop("gpu", None)
    return {group: c["name"] if isinstance(c, dict) else c for group, c in chosen.items()}


def _common_names(rows: list[Row]) -> dict[str, str]:
    """Of the names, those that are the same in all rows."""
    names = [_names(row) for row in rows]
    return {
        group: name for group, name in names[0].items() if all(n.get(group) == name for n in names)
    }


def _notes(row: Row) -> dict[str, str]:
    """The device, where there is a word for it, and what else was noted beside the metrics."""
    device = {"device": row["device"]} if row.get("device") else {}
    return device | row.get("notes", {})


def _image(name: str, images: dict[str, bytes]) -> str:
    data = base64.b64encode(images[name]).decode()
    return f'<img alt="{_escape(name)}" src="data:image/png;base64,{data}">'


def _html_table(table: pd.DataFrame) -> str:
    header = "".join(f"<th>{_escape(column)}</th>" for column in table.columns)
    lines = []
    for cells in table.itertuples(index=False):
        status = cells[table.columns.get_loc("status")] if "status" in table else "ok"
        css = "" if status == "ok" else f" class={status}"
        lines.append(f"<tr{css}>{''.join(f'<td>{_escape(_cell(c))}</td>' for c in cells)}</tr>")
    return f"<table><tr>{header}</tr>{''.join(lines)}</table>"


def _text(table: pd.DataFrame) -> str:
    return table.map(_cell).to_string(index=False)


def _cell(value: object) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _swept_text(row: Row) -> str:
    return ", ".join(f"{key}={value}" for key, value in row["swept"].items()) or "this run"


def _indented(value: dict, depth: int = 0) -> str:
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines += [f"{'  ' * depth}{key}:", _indented(item, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{key}: {item}")
    return "\n".join(lines)


def _escape(value: object) -> str:
    return html.escape(str(value))


def main() -> None:
    """Rebuild the report of a results folder."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="output folder of a run, or root of a sweep")
    arguments = parser.parse_args()
    try:
        print(write_report(ResultsFolder(arguments.folder)))
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
