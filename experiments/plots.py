"""The figures of a report: a metric over the swept keys, and pool occupancy over time."""

import itertools
import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .results import Row

FIRST_AXES = ("cache.block_size", "cache.watermark")
MAX_OCCUPANCY_PANELS = 64
OCCUPANCY_COLORS = {"in_use": "#d1495b", "cached": "#edae49", "free": "#d9e2e7"}


def choose_axes(swept: list[str]) -> list[str]:
    """The swept keys with those that make the x and y axes first: block size x watermark if so."""
    first = [key for key in FIRST_AXES if key in swept]
    return first + [key for key in swept if key not in first]


def metric_figure(metric: str, rows: list[Row], swept: list[str]) -> Figure:
    """A metric over the swept keys: points for one key, a heat map for two, a panel for others.

    All panels share one scale. A point without a value is left out of a line and grey in a map.
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
    figure.supxlabel("simulated time, s", fontsize=10)
    figure.supylabel("share of the GPU pool, %", fontsize=10)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _draw_points(axis: Axes, metric: str, rows: list[Row], x: str) -> None:
    finished = [row for row in rows if metric in row["metrics"]]
    # Swept values are spaced evenly: block sizes double, watermarks don't.
    levels = _levels(rows, x)
    at = [levels.index(row["swept"][x]) for row in finished]
    axis.plot(at, [row["metrics"][metric] for row in finished], "o-", color="#30638e")
    axis.set_xticks(range(len(levels)), [_label(level) for level in levels])
    axis.set_xlabel(x)
    axis.grid(alpha=0.3)


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


def _rank(key: str, row: Row, rows: list[Row]) -> int:
    return _levels(rows, key).index(row["swept"][key])


def _short_title(row: Row, keys: list[str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {_label(row['swept'][key])}" for key in keys)


def _label(value: object) -> str:
    if isinstance(value, float) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
