"""The figures of a report: metrics over the swept keys, pool occupancy, hit rate over capacity."""

import itertools
import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .results import Row

FIRST_AXES = ("cache.num_gpu_blocks", "cache.block_size", "cache.watermark")
CAPACITY_KEYS = {"cache.num_gpu_blocks", "evictor"}
MAX_OCCUPANCY_PANELS = 64
MARKERS = "osv^D<>pXP"
LINE_COLORS = (
    *("#30638e", "#d1495b", "#2e933c", "#e07a1f", "#7b4fa3", "#8c5a3c"),
    *("#d977b6", "#5f6b6d", "#b0a01f", "#1aa7b8", "#1b1b7a", "#9acd32"),
)
OCCUPANCY_COLORS = {"in_use": "#d1495b", "cached": "#edae49", "free": "#d9e2e7"}


def choose_axes(swept: list[str]) -> list[str]:
    """The swept keys with those that make the x and y axes first: block size x watermark if so."""
    first = [key for key in FIRST_AXES if key in swept]
    return first + [key for key in swept if key not in first]


def metric_figure(metric: str, rows: list[Row], swept: list[str]) -> Figure:
    """A metric over the swept keys: points for one key, a heat map for two, a panel for others.

    Where the second key is a choice of names, a line each takes the place of the map. All panels
    share one scale. A point without a value is left out of a line and grey in a map.
    """
    x, *others = choose_axes(swept)
    y, panel_keys = (others[0], others[1:]) if others else (None, [])
    panels = _grouped(rows, panel_keys)
    columns = min(len(panels), 3)
    height = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.6 * columns, 3.9 * height), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False)
    values = [row["metrics"][metric] for row in rows if metric in row["metrics"]]
    limits = (np.nanmin(values), np.nanmax(values))
    for axis, (panel, members) in itertools.zip_longest(
        axes.flat, panels.items(), fillvalue=((), [])
    ):
        if not members:
            axis.set_axis_off()
            continue
        if y is None:
            _draw_points(axis, metric, members, x)
        elif _is_named(rows, y) and not _is_named(rows, x):
            _draw_lines(axis, metric, members, x, y)
        else:
            _draw_heat_map(axis, metric, members, x, y, limits)
        title = ", ".join(f"{k}={v}" for k, v in zip(panel_keys, panel, strict=True))
        axis.set_title(f"{metric}\n{title}" if title else metric, fontsize=11)
    return figure


def occupancy_figure(rows: list[Row], swept: list[str]) -> Figure:
    """Blocks in use, cached and free over simulated time, a panel a row, as shares of the pool."""
    keys = choose_axes(swept)
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


def _draw_points(axis: Axes, metric: str, rows: list[Row], x: str) -> None:
    _plot_levels(axis, metric, rows, x, _levels(rows, x), color="#30638e", marker="o")
    axis.set_xlabel(x)
    axis.grid(alpha=0.3)


def _draw_lines(axis: Axes, metric: str, rows: list[Row], x: str, y: str) -> None:
    levels = _levels(rows, x)
    for i, name in enumerate(_levels(rows, y)):
        members = [row for row in rows if row["swept"][y] == name]
        style = {"color": LINE_COLORS[i % len(LINE_COLORS)], "marker": MARKERS[i % len(MARKERS)]}
        _plot_levels(axis, metric, members, x, levels, label=name, markersize=4, **style)
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
    axis.plot(at, [row["metrics"][metric] for row in finished], linestyle="-", **style)
    rotation = 45 if len(levels) > 8 else 0
    axis.set_xticks(range(len(levels)), [_label(level) for level in levels], rotation=rotation)


def _draw_heat_map(
    axis: Axes, metric: str, rows: list[Row], x: str, y: str, limits: tuple[float, float]
) -> None:
    columns, lines = _levels(rows, x), _levels(rows, y)
    grid = np.full((len(lines), len(columns)), np.nan)
    for row in rows:
        where = lines.index(row["swept"][y]), columns.index(row["swept"][x])
        grid[where] = row["metrics"].get(metric, np.nan)
    axis.set_facecolor("#eeeeee")
    image = axis.imshow(grid, aspect="auto", cmap="viridis", vmin=limits[0], vmax=limits[1])
    axis.figure.colorbar(image, ax=axis)
    axis.set_xticks(range(len(columns)), [_label(level) for level in columns])
    axis.set_yticks(range(len(lines)), [_label(level) for level in lines])
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if grid.size > 150:
        return
    middle = (limits[0] + limits[1]) / 2
    for (line, column), value in np.ndenumerate(grid):
        text = "-" if np.isnan(value) else _label(value)
        color = "black" if np.isnan(value) or value > middle else "white"
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
    """The distinct values of a swept key: numbers by size, others in the order of the rows."""
    levels = []
    for row in rows:
        if row["swept"][key] not in levels:
            levels.append(row["swept"][key])
    return sorted(levels) if all(isinstance(level, int | float) for level in levels) else levels


def _is_named(rows: list[Row], key: str) -> bool:
    """Whether the values of a swept key are words."""
    return all(isinstance(row["swept"][key], str) for row in rows)


def _rank(key: str, row: Row, rows: list[Row]) -> int:
    return _levels(rows, key).index(row["swept"][key])


def _short_title(row: Row, keys: list[str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {_label(row['swept'][key])}" for key in keys)


def _label(value: object) -> str:
    if isinstance(value, float) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
