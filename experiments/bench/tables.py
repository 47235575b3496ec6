"""Short tables of a results folder of `bench`, in Markdown.

python -m experiments.bench.tables DIR
"""

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..ranges import InputError
from ..results import ResultsFolder, Row
from .shapes import SHAPES

NAMES = ("operation", "by")
MESSAGE_LENGTH = 200


def measured_table(rows: list[Row]) -> str:
    """What went wrong, then a line a measured point, operation by operation, then what is absent.

    The last column is the time over that of this project's kernels for the same operation.
    """
    measured = [row for row in rows if row["metrics"]]
    ours = [row for row in measured if _is_own(row) and row["status"] == "ok"]
    own = {_label(row): row["metrics"]["p50_us"] for row in ours}
    heads = ["operation", "by", "p50 us", "p20 to p80", "GB/s", "TFLOP/s", "of limit", "x ours"]
    lines = [_measured_line(row, own.get(_label(row))) for row in _in_order(measured)]
    parts = [_kinds(rows), _problems(rows), markdown(heads, lines), _absent(rows)]
    return "\n\n".join(filter(None, [*parts, _ceilings(measured)]))


def _measured_line(row: Row, own_us: float | None) -> list[str]:
    metrics = row["metrics"]
    p50_us = metrics["p50_us"]
    marks = "".join(
        mark
        for mark, applies in (
            ("!", row["status"] == "suspect"),
            ("~", metrics.get("launch_bound")),
            ("*", row["notes"].get("clock") == "stream"),
        )
        if applies
    )
    share = metrics.get("share_of_limit")
    return [
        _label(row),
        row["config"]["implementation"],
        f"{p50_us:,.1f}{marks}",
        f"{metrics['p20_us']:,.1f} to {metrics['p80_us']:,.1f}",
        _rate(metrics.get("achieved_gb_per_s")),
        _rate(metrics.get("achieved_tflop_per_s")),
        "" if share is None else f"{share:.0%}",
        "" if own_us is None else f"{p50_us / own_us:.2f}",
    ]


def _kinds(rows: list[Row]) -> str:
    """What the figures are where they are not measured: predicted, or from a rehearsal."""
    kinds = {row["notes"].get("kind", "measured") for row in rows if row["metrics"]}
    return " ".join(sorted(f"{kind.capitalize()}." for kind in kinds if ":" in kind))


def _problems(rows: list[Row]) -> str:
    """A line for each failed or suspect point: what the first line of its message says."""
    return "\n".join(
        f"{row['status']}: {_label(row)} by {row['config']['implementation']}: "
        f"{row['message'].partition(chr(10))[0][:MESSAGE_LENGTH]}"
        for row in rows
        if row["status"] in ("failed", "suspect")
    )


def _absent(rows: list[Row]) -> str:
    messages = sorted({row["message"] for row in rows if row["status"] == "absent"})
    return f"absent: {'; '.join(messages)}" if messages else ""


def _ceilings(rows: list[Row]) -> str:
    """What the limits are made of, and what the marks mean."""
    links, products, known = {}, {}, {}
    for row in rows:
        operation, metrics = row["config"]["operation"], row["metrics"]
        if "link_gb_per_s" in metrics:
            known = metrics
            link = operation.get("direction", "memory").replace("_", " ")
            links[link] = f"{link} {metrics['link_gb_per_s']:,.4g} GB/s"
            dtype = operation.get("dtype", "bf16")
            products[dtype] = f"{dtype} {metrics['matrix_tflop_per_s']:,.4g} TFLOP/s"
    if not known:
        return ""
    return (
        f"Of this device, measured first: {', '.join(links.values())} (a copy "
        f"{known['copy_gb_per_s']:,.4g}); products of matrices: {', '.join(products.values())}; an "
        f"empty call {known['empty_call_us']:.3g} us. ~: little more than a launch. *: no CUDA "
        "graph, so with gaps between launches. !: above the device's peak, so counted wrong."
    )


def predicted_table(rows: list[Row]) -> str:
    """Of predicted rows, what each operation moves, what the kernels touch, and each GPU's time.

    Times are predicted: the data sheet's rates, nothing else; ~ marks those below a launch. A
    second table has what the compiler made of the kernels for each target: registers a thread, KiB
    of shared memory, warp instructions a KV token where there is a main loop over them.
    """
    targets = {row["config"]["gpu"]["name"]: row["notes"]["target"] for row in rows}
    gpus = sorted(targets, key=lambda gpu: _natural(targets[gpu]))
    times: list[list[str]] = []
    code: dict[tuple[str, ...], list[str]] = {}
    for label, group in _groups(rows):
        by_gpu = {row["config"]["gpu"]["name"]: row["metrics"] for row in group}
        first = group[0]["metrics"]
        touched = first.get("touched_over_needed")
        times.append(
            [
                label,
                f"{first['needed_bytes'] / 1e6:,.4g}",
                f"{first['flops'] / 1e9:,.4g}" if first["flops"] else "",
                "" if touched is None else f"{touched:.3f}",
                *(_microseconds(by_gpu.get(gpu)) for gpu in gpus),
            ]
        )
        cells = tuple(_machine_code(by_gpu.get(gpu)) for gpu in gpus)
        code.setdefault(cells, []).append(label)
    heads = ["operation", "MB", "GFLOP", "touched / needed", *(f"{gpu}, us" for gpu in gpus)]
    code_heads = ["operation", *(targets[gpu] for gpu in gpus)]
    code_lines = [[", ".join(labels), *cells] for cells, labels in code.items()]
    return "\n\n".join([markdown(heads, times), markdown(code_heads, code_lines)])


def _microseconds(metrics: dict | None) -> str:
    if metrics is None:
        return ""
    return f"{metrics['predicted_us']:,.4g}{'~' * metrics['launch_bound']}"


def _machine_code(metrics: dict | None) -> str:
    if metrics is None:
        return ""
    parts = [f"{metrics['registers']} regs", f"{metrics['shared_bytes'] / 1024:.3g} K"]
    if metrics.get("instructions_per_token"):
        parts.append(f"{metrics['instructions_per_token']:.3g} instr")
    if metrics["spilled_bytes"]:
        parts.append(f"{metrics['spilled_bytes']} B spilled")
    return ", ".join(parts)


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table whose columns are as wide as they have to be; those of names are aligned left."""
    cells = [list(heads), *map(list, lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [head in NAMES for head in heads]
    rule = [
        ":" + "-" * (width - 1) if is_name else "-" * (width - 1) + ":"
        for width, is_name in zip(widths, left, strict=True)
    ]
    text = [
        "| "
        + " | ".join(
            cell.ljust(width) if is_name else cell.rjust(width)
            for cell, width, is_name in zip(line, widths, left, strict=True)
        )
        + " |"
        for line in (cells[0], rule, *cells[1:])
    ]
    return "\n".join(text)


def _label(row: Row) -> str:
    """What was measured: the swept values, the implementation and the GPU left out."""
    swept = {k: v for k, v in row["swept"].items() if k not in ("implementation", "gpu")}
    name = str(swept.pop("operation", row["config"]["operation"]["name"]))
    return " ".join([name, *(f"{key.rpartition('.')[2]}={v}" for key, v in swept.items())])


def _is_own(row: Row) -> bool:
    return row["config"]["implementation"] == "prefixlab"


def _in_order(rows: list[Row]) -> list[Row]:
    """By operation, and within one this project's kernels first."""
    return sorted(rows, key=lambda row: (_rank(row), not _is_own(row)))


def _groups(rows: list[Row]) -> Iterable[tuple[str, list[Row]]]:
    for label, group in itertools.groupby(sorted(rows, key=_rank), _label):
        yield label, list(group)


def _rank(row: Row) -> tuple[int, list]:
    """Shapes in their order, and within one swept values by size."""
    name = row["config"]["operation"]["name"]
    order = list(SHAPES).index(name) if name in SHAPES else len(SHAPES)
    return order, _natural(_label(row))


def _natural(text: str) -> list:
    """A key that sorts sm_90 before sm_100, and both before gfx942."""
    parts = re.split(r"(\d+)", text)
    return [text.startswith("gfx"), *(int(p) if p.isdigit() else p for p in parts)]


def _rate(value: float | None) -> str:
    return "" if not value else f"{value:,.4g}"


def main() -> None:
    """Print the table of a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="output folder of a run, or root of a sweep")
    folder = ResultsFolder(parser.parse_args().folder)
    try:
        folder.manifest()
        rows = folder.rows()
    except InputError as error:
        sys.exit(f"error: {error}")
    predicted = [row for row in rows if "predicted_us" in row["metrics"]]
    others = [row for row in rows if "predicted_us" not in row["metrics"]]
    devices = dict.fromkeys(row["device"] for row in others if row["metrics"])
    if predicted:
        print(predicted_table(predicted))
    if others or not predicted:
        print("\n" * bool(predicted) + "\n\n".join([*devices, measured_table(others)]))


if __name__ == "__main__":
    main()
