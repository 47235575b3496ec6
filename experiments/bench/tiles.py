"""The fastest tiles of a `tile_choice` sweep, and how they become the defaults of the kernels.

    python -m experiments.bench.tiles DIR            a table: winner and default for each choice
    python -m experiments.bench.tiles DIR --write    and the winners go into kernels/launch.py

A choice is what the tables of tiles tell apart: the device, the kind of cache, the head size, and
decode or prefill. All tiles of one choice must have been timed under the same conditions.
"""

import argparse
import ast
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kernels.launch import Target, Tile, attention_tiles, tile_kind
from kernels.offline import DTYPES, format_table

from ..ranges import InputError
from ..results import REPOSITORY, ResultsFolder, Row, write_whole

LAUNCH = REPOSITORY / "kernels" / "launch.py"
TABLE = "_ATTENTION_TILES"
LEAST_GAIN = 0.02
"""Of the default's time; less is noise, and the default stays."""


class Choice(NamedTuple):
    """What a tile of the tables is chosen for."""

    target: str
    backend: str
    kind: str
    head_size: int
    decode: bool

    @property
    def phase(self) -> str:
        return "decode" if self.decode else "prefill"


@dataclass(frozen=True)
class Winner:
    """The fastest tile of a choice beside the one that is now taken; medians in us."""

    choice: Choice
    tile: Tile
    p50_us: float
    default: Tile
    default_us: float | None
    default_failed: bool

    @property
    def gain(self) -> float | None:
        """The part of the default's time that the winner saves."""
        return None if self.default_us is None else 1 - self.p50_us / self.default_us

    @property
    def kept(self) -> str:
        """Why the default stays; empty where the winner replaces it."""
        if self.choice.head_size % 16:
            return "keep: unaligned heads take the tiles of another table"
        if self.tile == self.default:
            return "keep: nothing is faster"
        if self.gain is None:
            return "" if self.default_failed else "keep: the default was not timed"
        return f"keep: below {LEAST_GAIN:.0%}" if self.gain < LEAST_GAIN else ""


@dataclass(frozen=True)
class _Timed:
    """One row that was timed: `tile` is None for the default, whatever it was at that time."""

    choice: Choice
    tile: Tile | None
    group: int
    p50_us: float
    default: Tile
    conditions: dict[str, Any]

    @property
    def applies(self) -> bool:
        """False for what no table can say: decode of more heads than rows takes prefill's tile."""
        return self.tile in (None, self.default) or not (
            self.choice.decode and self.tile[0] < self.group
        )


def choose_tiles(rows: list[Row]) -> list[Winner]:
    """The winner of each choice, in their order, from the rows whose status is ok.

    Raises InputError where nothing was timed, for rows of another experiment, and where conditions
    other than the tile differ within a choice.
    """
    timed = [_timed(row) for row in rows if row["status"] == "ok"]
    if not timed:
        raise InputError(f"none of {len(rows)} rows is ok: nothing was timed")
    failed = [_conditions(row) for row in rows if row["status"] == "failed" and not _tile(row)]
    groups: dict[Choice, list[_Timed]] = {}
    for one in timed:
        groups.setdefault(one.choice, []).append(one)
    return [_winner(group, failed) for _, group in sorted(groups.items())]


def _timed(row: Row) -> _Timed:
    kind = row["notes"].get("kind", "of no known kind")
    if kind != "measured":
        raise InputError(
            f"row {row['config_hash']} was not measured on a GPU ({kind}), so it can't tell which "
            "tile is the fastest"
        )
    try:
        return _read(row)
    except KeyError as error:
        raise InputError(f"row {row['config_hash']} is not of tile_choice: no {error}") from None


def _read(row: Row) -> _Timed:
    notes, operation = row["notes"], row["config"]["operation"]
    tile = _tile(row)
    query_bytes = DTYPES[operation["dtype"]].itemsize
    cache_dtype = operation["cache_dtype"]
    cache_bytes = query_bytes if cache_dtype == "auto" else DTYPES[cache_dtype].itemsize
    choice = Choice(
        notes["target"],
        notes["backend"],
        tile_kind(cache_bytes, query_bytes),
        operation["head_size"],
        "context_len" in operation,
    )
    group = operation["num_heads"] // operation["num_kv_heads"]
    default = _default(choice, group, cache_bytes, query_bytes)
    return _Timed(choice, tile, group, row["metrics"]["p50_us"], default, _conditions(row))


def _default(choice: Choice, group: int, cache_bytes: int, query_bytes: int) -> Tile:
    """The tile that is now taken, for `group` query heads a KV head."""
    tiles = attention_tiles(
        # Tables are found by the names alone, also for devices that are no offline target.
        Target(choice.target, choice.backend, "", 0, 1),
        choice.head_size,
        group,
        cache_bytes,
        query_bytes,
        decode=choice.decode,
        aligned=choice.head_size % 16 == 0,
    )
    return tiles.tile_m, tiles.tile_n, tiles.num_warps, tiles.num_stages


def _tile(row: Row) -> Tile | None:
    """The tile that a row was to be measured with; None: the default."""
    operation = row["config"]["operation"]
    if "tile" not in operation:
        raise InputError(
            f"row {row['config_hash']} measures {operation.get('name')}: it has no tile"
        )
    tile = operation["tile"]
    values = tuple(tile[key] for key in ("m", "n", "num_warps", "num_stages"))
    return None if values[0] is None else values


def _conditions(row: Row) -> dict[str, Any]:
    """Everything that a time depends on but the tile."""
    config = dict(row["config"])
    operation = {f"operation.{key}": value for key, value in config.pop("operation").items()}
    del operation["operation.tile"]
    return {**config, **operation, "device": row.get("device")}


def _winner(group: list[_Timed], failed: list[dict[str, Any]]) -> Winner:
    first = group[0]
    for other in group:
        _check_same(first, other)
    times = {one.default: one.p50_us for one in group if one.tile is None}
    # The default named by its numbers counts: the tables may have changed since the sweep.
    times |= {one.tile: one.p50_us for one in group if one.tile and one.applies}
    if not times:
        raise InputError(
            f"{_named(first.choice)}: no tile was timed with as many rows as there are query heads "
            f"a KV head, {first.group}"
        )
    tile = min(times, key=lambda tile: (times[tile], tile != first.default, tile))
    default_us = times.get(first.default)
    default_failed = first.conditions in failed
    return Winner(first.choice, tile, times[tile], first.default, default_us, default_failed)


def _check_same(first: _Timed, other: _Timed) -> None:
    one, two = first.conditions, other.conditions
    differing = sorted(key for key in one | two if one.get(key) != two.get(key))
    if differing:
        key = differing[0]
        raise InputError(
            f"{_named(first.choice)}: rows with {key}={one.get(key)} and {two.get(key)} can't be "
            "ranked together"
        )


def _named(choice: Choice) -> str:
    return f"{choice.target}, {choice.kind}, heads of {choice.head_size}, {choice.phase}"


def winner_table(winners: list[Winner]) -> str:
    """The winners as text, one line each."""
    return format_table(
        [
            {
                "target": winner.choice.target,
                "kind": winner.choice.kind,
                "head_size": winner.choice.head_size,
                "phase": winner.choice.phase,
                "winner": winner.tile,
                "p50_us": winner.p50_us,
                "default": winner.default,
                "default_p50_us": winner.default_us,
                "gain": None if winner.gain is None else f"{winner.gain:.1%}",
                "verdict": winner.kept or "replace",
            }
            for winner in winners
        ]
    )


def write_tiles(winners: list[Winner], path: Path = LAUNCH) -> list[str]:
    """Put the winners into the table of tiles in the file at `path`; comments there survive.

    A device without rows of its own gets a copy of its backend's. A row holds up to its head size,
    so a winner for a smaller one gets a new row before it, and so does a measured default that
    would otherwise change with its neighbour. A new row holds for all sizes down to the row before
    it. As decode of more heads than its tile has rows takes prefill's tile, a new tile of either
    can change that too.

    Returns a line for each change, and writes nothing if there is none. Raises InputError if the
    file has no such table.
    """
    old = source = path.read_bytes()
    # Smaller heads first: their new rows are copies of what larger ones are about to change.
    ordered = sorted(winners, key=lambda winner: (bool(winner.kept), winner.choice.head_size))
    wanted = {}
    for winner in ordered:
        if not winner.choice.head_size % 16:
            kept = _tile_for(old, winner.choice)
            wanted[winner.choice] = kept if winner.kept else winner.tile
    changed = []
    for choice, tile in wanted.items():
        if _tile_for(source, choice) != tile:
            source = _with_tile(source, choice, tile)
            changed.append(choice)
    wrong = [choice for choice, tile in wanted.items() if _tile_for(source, choice) != tile]
    if wrong:
        raise InputError(f"{path}: could not write the tile for {_named(wrong[0])}")
    if changed:
        write_whole(path, source)
    return [_change(source, choice) for choice in changed]


def _entries(source: bytes) -> dict[tuple[str, str], ast.List]:
    """The lists of rows in the table's literal, by their keys."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == TABLE:
            keys = map(ast.literal_eval, node.value.keys)
            return dict(zip(keys, node.value.values, strict=True))
    raise InputError(f"no literal {TABLE} in the file of tiles")


def _rows_for(source: bytes, choice: Choice) -> ast.List:
    entries = _entries(source)
    general = entries.get((choice.backend, choice.kind))
    rows = entries.get((choice.target, choice.kind), general)
    if rows is None:
        raise InputError(f"{TABLE} has no rows for {choice.backend}, {choice.kind}")
    return rows


def _row_for(source: bytes, choice: Choice) -> tuple[ast.Tuple, int]:
    """(row, first): the row that covers the choice, and the least head size that it holds for."""
    first = 1
    for row in _rows_for(source, choice).elts:
        last = row.elts[0].value
        if choice.head_size <= last:
            return row, first
        first = last + 1
    raise InputError(f"{TABLE} has no row for {_named(choice)}")


def _tile_for(source: bytes, choice: Choice) -> Tile:
    row, _ = _row_for(source, choice)
    return ast.literal_eval(row.elts[1 if choice.decode else 2])


def _with_tile(source: bytes, choice: Choice, tile: Tile) -> bytes:
    """`source` with this tile for the choice, in its row or in a new one."""
    key = (choice.target, choice.kind)
    if key not in _entries(source):
        rows = _rows_for(source, choice)
        lines = "".join(f"        {row},\n" for row in ast.literal_eval(rows))
        text = f",\n    {_quoted(key)}: [\n{lines}    ]"
        source = _spliced(source, _end(source, rows), _end(source, rows), text)
    row, _ = _row_for(source, choice)
    if row.elts[0].value == choice.head_size:
        node = row.elts[1 if choice.decode else 2]
        return _spliced(source, _start(source, node), _end(source, node), str(tile))
    _, decode_tile, prefill_tile = ast.literal_eval(row)
    tiles = (tile, prefill_tile) if choice.decode else (decode_tile, tile)
    text = f"{(choice.head_size, *tiles)},\n{' ' * row.col_offset}"
    return _spliced(source, _start(source, row), _start(source, row), text)


def _quoted(key: tuple[str, str]) -> str:
    return f"({', '.join(map(json.dumps, key))})"


def _spliced(source: bytes, start: int, end: int, text: str) -> bytes:
    return source[:start] + text.encode() + source[end:]


def _start(source: bytes, node: ast.expr) -> int:
    return _offset(source, node.lineno, node.col_offset)


def _end(source: bytes, node: ast.expr) -> int:
    return _offset(source, node.end_lineno, node.end_col_offset)


def _offset(source: bytes, line: int, column: int) -> int:
    before = itertools.islice(source.splitlines(keepends=True), line - 1)
    return sum(map(len, before)) + column


def _change(source: bytes, choice: Choice) -> str:
    row, first = _row_for(source, choice)
    key, tile = _quoted((choice.target, choice.kind)), _tile_for(source, choice)
    return f"{key}: {tile} for {choice.phase}, heads of {first} to {row.elts[0].value} lanes"


def _report(folder: Path, write: bool) -> Iterator[str]:
    rows = ResultsFolder(folder).rows()
    if not rows:
        raise InputError(f"{folder} holds no rows: not the folder of a sweep")
    winners = choose_tiles(rows)
    yield winner_table(winners)
    not_ok = sum(row["status"] != "ok" for row in rows)
    if not_ok:
        yield f"{not_ok} of {len(rows)} rows are not ok and were left out."
    if write:
        changes = write_tiles(winners, LAUNCH)
        yield f"{LAUNCH}:" if changes else "Nothing to write."
        yield from changes


def main() -> None:
    """Print the winners of a sweep, and write them where that is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.tiles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="root of a finished tile_choice sweep")
    parser.add_argument("--write", action="store_true", help="make the winners the defaults")
    arguments = parser.parse_args()
    try:
        for line in _report(arguments.folder, arguments.write):
            print(line)
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
