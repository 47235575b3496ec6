"""The figures of a report: metrics over the swept keys, roofline, occupancy, hit rates."""

import itertools
import math
import re
import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .results import Row

FIRST_AXES = ("cache.num_gpu_blocks", "cache.block_size", "cache.watermark")
CAPACITY_KEYS = {"cache.num_gpu_blocks", "evictor"}
RANGES = {"p50_us": ("p20_us", "p80_us")}
"""Metrics that are drawn with a range around them, and which metrics bound it."""
MAX_OCCUPANCY_PANELS = 64
MAX_BARS = 60
MAX_WRITTEN_CELLS = 200
"""Of a heat map: in larger ones numbers would run into each other."""
TITLE_WIDTH = 44
"""Characters that fit above a panel."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
MARKERS = "osv^D<>pXP"
LINE_COLORS = (
    *("#30638e", "#d1495b", "#2e933c", "#e07a1f", "#7b4fa3", "#8c5a3c"),
    *("#d977b6", "#5f6b6d", "#b0a01f", "#1aa7b8", "#1b1b7a", "#9acd32"),
)
IMPLEMENTATIONS = (
    *("prefixlab", "torch_ops", "flex_attention", "flashinfer", "vllm", "flash_attn", "host"),
)
"""Those that come first in the colors; others follow in the order of the rows."""
OCCUPANCY_COLORS = {"in_use": "#d1495b", "cached": "#edae49", "free": "#d9e2e7"}


def choose_axes(swept: list[str], rows: list[Row]) -> list[str]:
    """The swept keys with those that make the x and y axes first: block size x watermark if so.

    Numbers come before words, and different operations last: they go into panels. Implementations
    are compared first of all, so they come second, and make the lines; or first where there is no
    number to draw them over.
    """
    first = [key for key in FIRST_AXES if key in swept]
    others = [key for key in swept if key not in (*first, "implementation", "operation")]
    numbers = first + [key for key in others if not _is_named(rows, key)]
    words = [key for key in ("implementation", *others, "operation") if key in swept]
    words = [key for key in words if key not in numbers]
    if "implementation" not in swept:
        return numbers + words
    return numbers[:1] + words[:1] + numbers[1:] + words[1:]


def metric_figure(metric: str, rows: list[Row], swept: list[str]) -> Figure:
    """A metric over the swept keys: points for one key, a heat map for two, a panel for others.

    Where the second key is a choice of names, a line each takes the place of the map. All panels
    share one scale, maps of different operations excepted; it is logarithmic for times that differ
    by more than a decade. A point without a value is left out of a line and grey in a map; a panel
    without any is left out.
    """
    x, *others = choose_axes(swept, rows)
    y, panel_keys = (others[0], others[1:]) if others else (None, [])
    have = [row for row in rows if metric in row["metrics"]]
    panels = {
        panel: members
        for panel, members in _grouped(rows, panel_keys).items()
        if any(metric in row["metrics"] for row in members)
    }
    are_lines = y is None or (_is_named(rows, y) and not _is_named(rows, x))
    columns = min(len(panels), 3)
    height = math.ceil(len(panels) / columns)
    panel_width, panel_height = (5.6, 3.9) if are_lines else _map_size(rows, x, y)
    size = panel_width * columns, panel_height * height
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False, sharey=are_lines)
    norm = _norm(metric, have)
    alike = ["operation"] if "operation" in panel_keys else []
    norms = {key: _norm(metric, members) for key, members in _grouped(have, alike).items()}
    styles = _styles(rows, y if y is not None else "implementation")
    for axis, (panel, members) in itertools.zip_longest(
        axes.flat, panels.items(), fillvalue=((), [])
    ):
        if not members:
            axis.set_axis_off()
            continue
        if y is None:
            _draw_points(axis, metric, members, x, styles)
        elif are_lines:
            _draw_lines(axis, metric, members, x, y, styles)
        else:
            (key,) = _grouped(members, alike)
            _draw_heat_map(axis, metric, members, x, y, norms[key])
        if are_lines and isinstance(norm, LogNorm):
            axis.set_yscale("log")
        name = metric
        if are_lines and metric in RANGES:
            name += f", bars from {' to '.join(RANGES[metric])}"
        pairs = zip(panel_keys, panel, strict=True)
        title = ", ".join(f"{_short_key(key, swept)}={value}" for key, value in pairs)
        axis.set_title("\n".join([name, *textwrap.wrap(title, TITLE_WIDTH)]), fontsize=11)
    _warn(figure, have)
    return figure


def _map_size(rows: list[Row], x: str, y: str) -> tuple[float, float]:
    """Width and height of a heat map, in inches, that has room for its labels and numbers."""
    lines = _levels(rows, y)
    label_width = 0.08 * max(len(_label(line)) for line in lines)
    width = 2 + label_width + 0.55 * min(len(_levels(rows, x)), 20)
    return max(5.6, width), max(3.9, 1.2 + 0.25 * len(lines))


def _norm(metric: str, rows: list[Row]) -> Normalize:
    """The scale of these rows: logarithmic for times that differ by more than a decade."""
    values = [row["metrics"][metric] for row in rows]
    low, high = np.nanmin(values), np.nanmax(values)
    is_time = metric.endswith(("_s", "_us")) and not metric.endswith("_per_s")
    return LogNorm(low, high) if is_time and 0 < 10 * low < high else Normalize(low, high)


def _styles(rows: list[Row], key: str) -> dict[str, dict[str, str]]:
    """Color and marker of each value of a swept key; of an implementation the same everywhere."""
    if key == "implementation":
        named = [row["config"].get(key, "") for row in rows]
        names = dict.fromkeys([*IMPLEMENTATIONS, *named])
    else:
        names = _levels(rows, key)
    return {
        name: {"color": LINE_COLORS[i % len(LINE_COLORS)], "marker": MARKERS[i % len(MARKERS)]}
        for i, name in enumerate(names)
    }


def _warn(figure: Figure, rows: list[Row]) -> None:
    """Write above a figure what its rows are where they weren't all measured."""
    kinds = dict.fromkeys(row.get("notes", {}).get("kind", "") for row in rows)
    said = "; ".join(kind for kind in kinds if kind not in ("", "measured"))
    if said:
        figure.suptitle(said, fontsize=11, color="#b03030")


def roofline_figure(rows: list[Row]) -> Figure:
    """What timed rows reach of what the device can do, as measured in the same process.

    Left, rows that compute: FLOP/s over FLOPs a byte, under the rate of memory (slanted) and that
    of matrix products (level). Right, rows that only move bytes: a bar each, and a tick at the rate
    of their link. Hollow: launching takes as long as the kernel. Rows without such metrics are left
    out.
    """
    styles = _styles(rows, "implementation")
    rows = [row for row in rows if "achieved_tflop_per_s" in row["metrics"]]
    computing = [row for row in rows if row["metrics"]["flops"]]
    moving = [row for row in rows if not row["metrics"]["flops"]]
    present = {row["config"]["implementation"] for row in rows}
    colors = {name: style["color"] for name, style in styles.items() if name in present}
    num_panels = bool(computing) + bool(moving)
    height = max(5.5, 1.2 + 0.25 * min(len(moving), MAX_BARS))
    figure = Figure(figsize=(7 * num_panels + 1.5, height), layout="constrained")
    axes = list(figure.subplots(1, num_panels, squeeze=False).flat)
    handles = [Line2D([], [], color=c, linewidth=5, label=name) for name, c in colors.items()]
    if computing:
        handles += _draw_roofline(axes.pop(0), computing, colors)
    if moving:
        _draw_bars(axes.pop(0), moving, colors)
        ceiling = {"marker": "|", "markersize": 12, "linestyle": "none", "color": "black"}
        handles.append(Line2D([], [], label="measured rate of the link", **ceiling))
    if any(row["metrics"]["launch_bound"] for row in rows):
        hollow = {"marker": "s", "markerfacecolor": "none", "linestyle": "none", "color": "black"}
        handles.append(Line2D([], [], label="hollow: launch-bound", **hollow))
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    _warn(figure, rows)
    return figure


def _draw_roofline(axis: Axes, rows: list[Row], colors: dict[str, str]) -> list[Line2D]:
    """Ceilings, and a marker a row; returns the legend's entries for operations."""
    slanted, level = _ceilings(rows, "link_gb_per_s"), _ceilings(rows, "matrix_tflop_per_s")
    at = [row["metrics"]["intensity"] for row in rows]
    # Both sides of each ridge, where 1,000 GB/s at one FLOP a byte are one TFLOP/s.
    left = min(*at, 1000 * level[-1] / slanted[0] / 4) / 2
    right = max(*at, 1000 * level[0] / slanted[-1] * 4) * 2
    style = {"color": "#555555", "linewidth": 1.2, "zorder": 1}
    note = {"textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 8}
    for rate in slanted:
        ridge = 1000 * level[0] / rate
        axis.plot([left, ridge], [rate * left / 1000, level[0]], **style)
        middle = math.sqrt(left * ridge)
        where = middle, rate * middle / 1000
        axis.annotate(f"{_rate(rate)} GB/s", where, xytext=(-4, 2), **note)
    for rate in level:
        axis.plot([1000 * rate / slanted[0], right], [rate, rate], **style)
        axis.annotate(f"{_rate(rate)} TFLOP/s", (right, rate), xytext=(-2, 2), **note)
    names = list(dict.fromkeys(row["config"]["operation"]["name"] for row in rows))
    markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(names)}
    for row in rows:
        color = colors[row["config"]["implementation"]]
        axis.plot(
            row["metrics"]["intensity"],
            row["metrics"]["achieved_tflop_per_s"],
            marker=markers[row["config"]["operation"]["name"]],
            linestyle="none",
            color=color,
            markerfacecolor="none" if row["metrics"]["launch_bound"] else color,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOPs a byte")
    axis.set_ylabel("achieved TFLOP/s")
    axis.set_title("Operations that compute", fontsize=11)
    axis.grid(alpha=0.3)
    return [
        Line2D([], [], color="black", marker=marker, linestyle="none", label=name)
        for name, marker in markers.items()
    ]


def _draw_bars(axis: Axes, rows: list[Row], colors: dict[str, str]) -> None:
    """A bar a row, from top to bottom."""
    title = "Operations that only move bytes"
    if len(rows) > MAX_BARS:
        title += f", the first {MAX_BARS} of {len(rows)}"
        rows = rows[:MAX_BARS]
    differ = [key for key in rows[0]["swept"] if len(_levels(rows, key)) > 1]
    labels = []
    for i, row in enumerate(rows):
        metrics, color = row["metrics"], colors[row["config"]["implementation"]]
        achieved, ceiling = metrics["achieved_gb_per_s"], metrics["link_gb_per_s"]
        face = "none" if metrics["launch_bound"] else color
        axis.barh(i, achieved, height=0.7, facecolor=face, edgecolor=color)
        axis.plot(ceiling, i, marker="|", markersize=12, color="black", linestyle="none")
        axis.annotate(
            f"{_rate(achieved)} of {_rate(ceiling)}",
            (max(achieved, ceiling), i),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        named = [
            row["swept"].get("operation", row["config"]["operation"]["name"]),
            row["config"]["implementation"],
        ]
        others = [key for key in differ if key not in ("operation", "implementation")]
        labels.append(", ".join([*named, *([_short_title(row, others)] if others else [])]))
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.25, y=0.01)
    axis.set_xlim(left=0)
    axis.set_xlabel("achieved GB/s")
    axis.set_title(title, fontsize=11)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def _ceilings(rows: list[Row], metric: str) -> list[float]:
    """The distinct values of a ceiling, the highest first.

    Within 3% of a higher one it is the same, measured again by another process.
    """
    distinct: list[float] = []
    for value in sorted((row["metrics"][metric] for row in rows), reverse=True):
        if not distinct or value < distinct[-1] / 1.03:
            distinct.append(value)
    return distinct


def occupancy_figure(rows: list[Row], swept: list[str]) -> Figure:
    """Blocks in use, cached and free over simulated time, a panel a row, as shares of the pool."""
    keys = choose_axes(swept, rows)
    rows = sorted(rows, key=lambda row: [_rank(k, row, rows) for k in reversed(keys)])
    rows = rows[:MAX_OCCUPANCY_PANELS]
    across = len(_levels(rows, keys[0])) if keys else 1
    columns = min(max(across, 1), 8)
    height = math.ceil(len(rows) / columns)
    width = max(8.0, 2.6 * columns)
    figure = Figure(figsize=(width, max(3.5, 1.75 * height)), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False, sharex=True, sharey=True)
    for axis, row in itertools.zip_longest(axes.flat, rows):
        if row is None:
            axis.set_axis_off()
            continue
        _draw_occupancy(axis, row)
        axis.set_title(_short_title(row, keys), fontsize=8)
    figure.supxlabel("time, s", fontsize=10)
    figure.supylabel("share of the GPU pool, %", fontsize=10)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def capacity_figure(rows: list[Row]) -> Figure:
    """Block hit rate over capacity, a line a policy, and what each is above or below LRU.

    `rows` are swept over CAPACITY_KEYS. Policies that agree everywhere share a line. Belady and the
    cache without a bound are drawn as bounds, and the best of the others is named at each capacity.
    """
    curves = _capacity_curves(rows)
    online = {name: curve for name, curve in curves.items() if name != "belady"}
    base = online.get("lru", next(iter(online.values()), {}))
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 4))
    bounds = {r["swept"]["cache.num_gpu_blocks"]: r["metrics"] for r in rows if r["metrics"]}
    xs = sorted(bounds)
    unbounded = [100 * bounds[x]["unbounded_block_hit_rate"] for x in xs]
    top.plot(xs, unbounded, color="#888888", linestyle=":", label="unbounded cache")
    if "belady" in curves:
        curve = curves["belady"]
        top.plot(list(curve), list(curve.values()), "k--", label="belady (knows the future)")
    for i, (names, curve) in enumerate(_merged(online).items()):
        color, marker = LINE_COLORS[i % len(LINE_COLORS)], MARKERS[i % len(MARKERS)]
        style = {"color": color, "marker": marker, "markersize": 4, "linewidth": 1.4}
        top.plot(list(curve), list(curve.values()), label=names, **style)
        shared = [x for x in curve if x in base]
        bottom.plot(shared, [curve[x] - base[x] for x in shared], **style)
    _name_winners(bottom, online, base)
    top.set_ylabel("block hit rate, %")
    top.set_title("Hit rate over capacity", fontsize=12)
    top.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    bottom.set_ylabel(f"points above {'lru' if 'lru' in online else next(iter(online), '')}")
    bottom.set_xlabel("capacity, blocks (logarithmic)")
    bottom.set_xscale("log")
    bottom.set_xticks(xs, [f"{x:,}" for x in xs], rotation=45, ha="right", fontsize=8)
    bottom.minorticks_off()
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    return figure


def _capacity_curves(rows: list[Row]) -> dict[str, dict[int, float]]:
    """For each policy, the best on average first, the block hit rate in percent by capacity."""
    curves: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row["swept"]["cache.num_gpu_blocks"]):
        if row["metrics"]:
            curve = curves.setdefault(row["swept"]["evictor"], {})
            curve[row["swept"]["cache.num_gpu_blocks"]] = 100 * row["metrics"]["block_hit_rate"]
    return dict(sorted(curves.items(), key=lambda item: -float(np.mean(list(item[1].values())))))


def _merged(curves: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """The curves, with those that agree to 0.005 points joined under all their names."""
    groups: list[tuple[list[str], dict[int, float]]] = []
    for name, curve in curves.items():
        for names, known in groups:
            if known.keys() == curve.keys() and all(
                abs(known[x] - curve[x]) < 0.005 for x in known
            ):
                names.append(name)
                break
        else:
            groups.append(([name], curve))
    return {", ".join(names): curve for names, curve in groups}


def _name_winners(axis: Axes, curves: dict[str, dict[int, float]], base: dict[int, float]) -> None:
    """Write the name of the highest curve above it, wherever it is another one than before."""
    axis.margins(y=0.2)
    previous = None
    for x in base:
        at_x = {name: curve[x] for name, curve in curves.items() if x in curve}
        best = max(at_x, key=at_x.__getitem__)
        if best != previous:
            axis.annotate(
                best,
                (x, at_x[best] - base[x]),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                fontweight="bold",
            )
        previous = best


def _draw_points(
    axis: Axes, metric: str, rows: list[Row], x: str, styles: dict[str, dict[str, str]]
) -> None:
    """A line, in the color of the implementation; or a point each where these are compared."""
    levels = _levels(rows, x)
    for name in levels if x == "implementation" else [rows[0]["config"].get("implementation", "")]:
        members = [row for row in rows if x != "implementation" or row["swept"][x] == name]
        if any(metric in row["metrics"] for row in members):
            _plot_levels(axis, metric, members, x, levels, **styles[name])
    axis.set_xlabel(x)
    axis.grid(alpha=0.3)


def _draw_lines(
    axis: Axes, metric: str, rows: list[Row], x: str, y: str, styles: dict[str, dict[str, str]]
) -> None:
    levels = _levels(rows, x)
    for name in _levels(rows, y):
        members = [row for row in rows if row["swept"][y] == name]
        if any(metric in row["metrics"] for row in members):
            _plot_levels(axis, metric, members, x, levels, label=name, markersize=4, **styles[name])
    axis.set_xlabel(x)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, title=y, title_fontsize=7, ncols=2)


def _plot_levels(
    axis: Axes, metric: str, rows: list[Row], x: str, levels: list, **style: object
) -> None:
    """Draw a metric over the values of a swept key, which are spaced evenly."""
    finished = [row for row in rows if metric in row["metrics"]]
    # Block sizes double, watermarks don't: their places say nothing about their sizes.
    at = [levels.index(row["swept"][x]) for row in finished]
    values = np.array([row["metrics"][metric] for row in finished])
    bounds = RANGES.get(metric, ())
    if bounds and all(name in row["metrics"] for row in finished for name in bounds):
        low, high = (np.array([row["metrics"][name] for row in finished]) for name in bounds)
        axis.errorbar(at, values, [values - low, high - values], capsize=2, **style)
    else:
        axis.plot(at, values, linestyle="-", **style)
    _name_levels(axis, levels)


def _name_levels(axis: Axes, levels: list) -> None:
    """Write the values of a swept key along x, aslant where they would run into each other."""
    labels = [_label(level) for level in levels]
    are_long = len(labels) > 8 or len(labels) * max(map(len, labels)) > 48
    style = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if are_long else {}
    axis.set_xticks(range(len(labels)), labels, **style)


def _draw_heat_map(
    axis: Axes, metric: str, rows: list[Row], x: str, y: str, norm: Normalize
) -> None:
    columns, lines = _levels(rows, x), _levels(rows, y)
    grid = np.full((len(lines), len(columns)), np.nan)
    for row in rows:
        where = lines.index(row["swept"][y]), columns.index(row["swept"][x])
        grid[where] = row["metrics"].get(metric, np.nan)
    axis.set_facecolor("#eeeeee")
    image = axis.imshow(grid, aspect="auto", cmap="viridis", norm=norm)
    axis.figure.colorbar(image, ax=axis)
    _name_levels(axis, columns)
    axis.set_yticks(range(len(lines)), [_label(level) for level in lines])
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if grid.size > MAX_WRITTEN_CELLS:
        return
    for (line, column), value in np.ndenumerate(grid):
        text = "-" if np.isnan(value) else _label(value)
        color = "black" if np.isnan(value) or norm(value) > 0.5 else "white"
        axis.text(column, line, text, ha="center", va="center", color=color, fontsize=8)


def _draw_occupancy(axis: Axes, row: Row) -> None:
    series = {name: np.asarray(values) for name, values in row["occupancy"].items()}
    parts = [series[f"{name}_blocks"] for name in OCCUPANCY_COLORS]
    share = 100 / np.maximum(sum(parts), 1)
    axis.stackplot(
        series["time_s"],
        *(part * share for part in parts),
        labels=["in use", "cached", "free"],
        colors=OCCUPANCY_COLORS.values(),
    )
    axis.set_ylim(0, 100)
    axis.margins(x=0)
    axis.tick_params(labelsize=8)


def _grouped(rows: list[Row], keys: list[str]) -> dict[tuple, list[Row]]:
    """Rows by their values of `keys`, in the order of the rows."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row["swept"][key]) for key in keys), []).append(row)
    return groups


def _levels(rows: list[Row], key: str) -> list:
    """The distinct values of a swept key: numbers by size, others in the order of the rows.

    Words that differ in numbers alone stand together, in the order of these.
    """
    levels = []
    for row in rows:
        if row["swept"][key] not in levels:
            levels.append(row["swept"][key])
    if all(isinstance(level, int | float) for level in levels):
        return sorted(levels)
    if not _is_named(rows, key):
        return levels
    words = [NUMBER.sub("#", level) for level in levels]
    numbers = [[*map(float, NUMBER.findall(level))] for level in levels]
    places = [(words.index(word), number) for word, number in zip(words, numbers, strict=True)]
    return [level for _, level in sorted(zip(places, levels, strict=True))]


def _is_named(rows: list[Row], key: str) -> bool:
    """Whether the values of a swept key are words."""
    return all(isinstance(row["swept"][key], str) for row in rows)


def _rank(key: str, row: Row, rows: list[Row]) -> int:
    return _levels(rows, key).index(row["swept"][key])


def _short_key(key: str, swept: list[str]) -> str:
    """The last part of a dotted key, or all of it where another one ends in the same."""
    last = key.rpartition(".")[2]
    return key if [other.rpartition(".")[2] for other in swept].count(last) > 1 else last


def _short_title(row: Row, keys: list[str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {_label(row['swept'][key])}" for key in keys)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _label(value: object) -> str:
    if isinstance(value, float) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
