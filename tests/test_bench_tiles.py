"""Tiles taken by hand, the winner among timed ones, and how it becomes a default."""

import ast
import importlib.util
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from experiments.bench import tiles
from experiments.bench.tiles import choose_tiles, winner_table, write_tiles
from experiments.ranges import InputError
from experiments.results import ResultsFolder, Row
from kernels import launch
from kernels.launch import TARGETS, Target, Tile, override_attention_tile, record_launches
from kernels.paged_attention import paged_attention
from kernels.testing import AttentionInputs, attention_inputs, check_attention

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = {target.name: target.backend for target in TARGETS.values()} | {"sm_89": "cuda"}
BYTES = {"16-bit": (2, 2), "fp8 cache": (1, 2), "32-bit": (4, 4)}
TABLE = """\
_ATTENTION_TILES: dict[tuple[str, str], list[tuple[int, Tile, Tile]]] = {
    ("sm_90", "16-bit"): [
        (128, (16, 64, 2, 3), (64, 64, 4, 3)),
        (192, (16, 64, 4, 3), (64, 32, 4, 3)),
        (576, (16, 16, 8, 2), (32, 32, 8, 2)),
    ],
    ("cuda", "16-bit"): [
        (128, (16, 64, 2, 3), (64, 32, 8, 2)),
        (576, (16, 32, 8, 1), (16, 32, 8, 1)),
    ],
    ("cuda", "fp8 cache"): [
        (64, (16, 64, 2, 3), (64, 64, 4, 3)),
        (576, (16, 32, 8, 1), (16, 32, 8, 1)),
    ],
    ("cuda", "32-bit"): [
        (96, (16, 16, 8, 2), (16, 16, 8, 1)),
        (128, (16, 16, 8, 2), (16, 16, 8, 2)),
        (576, (8, 16, 8, 1), (8, 16, 8, 1)),
    ],
    ("hip", "16-bit"): [
        (256, (16, 32, 4, 2), (64, 32, 4, 2)),
        (576, (16, 32, 4, 1), (32, 32, 4, 1)),
    ],
    ("hip", "fp8 cache"): [
        (576, (16, 32, 4, 2), (16, 16, 8, 1)),
    ],
    ("hip", "32-bit"): [
        (576, (16, 16, 4, 1), (16, 16, 4, 1)),
    ],
}
"""
FAST: Tile = (32, 128, 8, 4)
OTHER: Tile = (128, 16, 4, 1)


@pytest.fixture(autouse=True)
def _fixed_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables may change with every sweep; what is tested here does not."""
    rows = ast.literal_eval(TABLE.partition(" = ")[2])
    monkeypatch.setattr(launch, "_ATTENTION_TILES", rows)


def small_inputs(query_lens: list[int]) -> AttentionInputs:
    torch.manual_seed(0)
    lengths = [70 + length for length in query_lens]
    return attention_inputs(lengths, query_lens, num_heads=10, num_kv_heads=2, head_size=16)


@pytest.mark.parametrize("tile", [(2, 16, 1, 1), (16, 32, 2, 2)], ids=str)
@pytest.mark.parametrize("query_lens", [[1, 1], [3, 8]], ids=["decode", "prefill"])
def test_any_tile_gives_the_reference(tile: Tile, query_lens: list[int]) -> None:
    """Also one with fewer rows than the 5 query heads a KV head."""
    with override_attention_tile(tile):
        check_attention(paged_attention, small_inputs(query_lens))


def recorded(tile: Tile | None, target: Target = TARGETS["sm_90"]) -> tuple[Tile, int, int]:
    """The tile of the launch, its heads, and its query tokens."""
    inputs = small_inputs([3, 20])
    with record_launches(target) as launches:
        if tile is None:
            paged_attention(**vars(inputs), scale=1.0)
        else:
            with override_attention_tile(tile):
                paged_attention(**vars(inputs), scale=1.0)
    args, options = launches[0].args, launches[0].options
    taken = (args["TILE_M"], args["TILE_N"], options["num_warps"], options["num_stages"])
    return taken, args["TILE_H"], args["TILE_Q"]


def test_the_launch_has_the_tile_and_then_the_default_again() -> None:
    default = recorded(None)
    assert recorded((32, 128, 8, 5)) == ((32, 128, 8, 5), 5, 6)
    assert recorded((4, 16, 1, 1), TARGETS["gfx942"]) == ((4, 16, 1, 1), 4, 1)
    assert recorded(None) == default != recorded((32, 128, 8, 5))


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ((48, 64, 4, 3), "tile_m is 48"),
        ((16, 24, 4, 3), "tile_n is 24"),
        ((16, 64, 6, 3), "num_warps is 6"),
        ((16, 64, 4, 0), "num_stages is 0"),
        ((0, 64, 4, 3), "tile_m is 0"),
        ((16, 64.0, 4, 3), "tile_n is 64.0"),
    ],
    ids=str,
)
def test_what_no_tile_can_be_is_refused(tile: Tile, message: str) -> None:
    with pytest.raises(ValueError, match=message), override_attention_tile(tile):
        pytest.fail("the block ran")
    assert launch._override.get() is None


def make_row(
    tile: Tile | None,
    p50_us: float | None,
    *,
    target: str = "sm_90",
    head_size: int = 128,
    phase: str = "decode",
    kind: str = "16-bit",
    group: int = 4,
    measured: str = "measured",
    status: str = "",
    **operation: object,
) -> Row:
    """A row of a sweep; without a time it has failed, and has no metrics and notes."""
    m, n, num_warps, num_stages = tile or (None,) * 4
    sizes = {"context_len": 4096} if phase == "decode" else {"prompt_len": 8192}
    config = {
        "name": phase,
        "num_kv_heads": 8,
        "num_heads": 8 * group,
        "head_size": head_size,
        "dtype": "fp32" if kind == "32-bit" else "bf16",
        "cache_dtype": "fp8e5m2" if kind == "fp8 cache" else "auto",
        "tile": {"m": m, "n": n, "num_warps": num_warps, "num_stages": num_stages},
    }
    timed = p50_us is not None
    notes = {"target": target, "backend": BACKENDS[target], "kind": measured}
    return {
        "config_hash": f"{phase}-{tile}-{head_size}-{target}-{kind}".replace(" ", ""),
        "swept": {"operation.tile": str(tile), "operation": phase},
        "status": status or ("ok" if timed else "failed"),
        "config": {"operation": config | sizes | operation, "seed": 0},
        "metrics": {"p50_us": p50_us} if timed else {},
        "notes": notes if timed else {},
    }


def test_the_fastest_row_that_is_ok_wins() -> None:
    """Each choice by itself; suspect, absent and failed rows count for nothing."""
    rows = [
        make_row(None, 100.0),
        make_row(OTHER, 95.0),
        make_row(FAST, 90.0),
        make_row((16, 16, 1, 1), 1.0, status="suspect"),
        make_row((16, 32, 1, 1), None, status="absent"),
        make_row((16, 64, 1, 1), None),
        make_row(None, 70.0, phase="prefill"),
        make_row(FAST, 80.0, phase="prefill"),
        make_row(FAST, 10.0, kind="fp8 cache"),
        make_row(OTHER, 20.0, kind="fp8 cache"),
    ]
    prefill, decode, fp8 = choose_tiles(rows)
    assert (decode.tile, decode.p50_us, decode.default_us, decode.kept) == (FAST, 90.0, 100.0, "")
    assert decode.default == (16, 64, 2, 3)
    assert decode.gain == pytest.approx(0.1)
    assert prefill.tile == prefill.default == (64, 64, 4, 3)
    assert (prefill.gain, prefill.kept) == (0, "keep: nothing is faster")
    assert (fp8.tile, fp8.gain, fp8.kept) == (FAST, None, "keep: the default was not timed")
    lines = winner_table([prefill, decode, fp8]).splitlines()
    assert lines[2].split("  ")[-2:] == ["10.0%", "replace"]
    assert "(32, 128, 8, 4)" in lines[2]
    assert lines[3].endswith("-               -      keep: the default was not timed")


@pytest.mark.parametrize(
    ("tile", "p50_us", "winner", "verdict"),
    [
        ((8, 16, 1, 1), 100.0, (16, 64, 2, 3), "keep: nothing is faster"),
        (FAST, 98.5, FAST, "keep: below 2%"),
        (FAST, 97.9, FAST, ""),
    ],
    ids=["tie", "noise", "gain"],
)
def test_the_default_stays_unless_the_gain_is_more_than_noise(
    tile: Tile, p50_us: float, winner: Tile, verdict: str
) -> None:
    (found,) = choose_tiles([make_row(tile, p50_us), make_row(None, 100.0)])
    assert (found.tile, found.kept) == (winner, verdict)


def test_a_default_that_fails_is_replaced() -> None:
    (found,) = choose_tiles([make_row(FAST, 50.0), make_row(None, None)])
    assert (found.tile, found.gain, found.kept) == (FAST, None, "")


def test_the_default_by_its_numbers_counts_more_than_the_one_of_then() -> None:
    """After a winner was written, the row without a tile tells the time of the old default."""
    rows = [make_row(None, 100.0), make_row((16, 64, 2, 3), 80.0), make_row(FAST, 90.0)]
    (found,) = choose_tiles(rows)
    assert (found.tile, found.default_us) == ((16, 64, 2, 3), 80.0)


def test_a_decode_tile_that_the_tables_would_not_take_cannot_win() -> None:
    """Decode of 32 heads a KV head takes prefill's tile where decode's has 16 rows."""
    rows = [make_row((16, 32, 1, 1), 1.0, group=32), make_row(FAST, 50.0, group=32)]
    (found,) = choose_tiles([*rows, make_row(None, 100.0, group=32)])
    assert (found.tile, found.default) == (FAST, (64, 64, 4, 3))
    with pytest.raises(InputError, match=r"no tile was timed with as many rows.*32"):
        choose_tiles(rows[:1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [make_row(FAST, 1.0, measured="predicted: nothing was timed")],
            r"^row \S+ was not measured on a GPU \(predicted: nothing was timed\), so it can't ",
        ),
        (
            [make_row(FAST, 1.0, measured="rehearsal: its times mean nothing")],
            r"not measured on a GPU \(rehearsal: its times mean nothing\), so it can't tell which",
        ),
        ([make_row(FAST, None)], "none of 1 rows is ok"),
        (
            [make_row(FAST, 1.0), make_row(None, 2.0, context_len=16)],
            "heads of 128, decode: rows with operation.context_len=4096 and 16",
        ),
        ([make_row(FAST, 1.0, dtype="int7")], "not of tile_choice: no 'int7'"),
    ],
    ids=["predicted", "rehearsal", "failed", "conditions", "dtype"],
)
def test_rows_that_tell_no_winner_are_refused(rows: list[Row], message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose_tiles(rows)


def test_rows_of_another_experiment_are_refused() -> None:
    row = make_row(FAST, 1.0)
    del row["config"]["operation"]["tile"]
    with pytest.raises(InputError, match="measures decode: it has no tile"):
        choose_tiles([row])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """kernels/launch.py with the table of these tests."""
    path = tmp_path / "launch.py"
    source = tiles.LAUNCH.read_text()
    path.write_text(re.sub(r"^_ATTENTION_TILES: .*?^}\n", TABLE, source, flags=re.M | re.S))
    assert TABLE in path.read_text()
    return path


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch_copy", path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["launch_copy"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["launch_copy"]
    return module


Combination = tuple[str, str, int, str, bool]


def all_tiles(module: ModuleType) -> dict[Combination, Tile]:
    """Every tile for a group of 4: by target, kind, head size, phase and whether aligned."""
    axes = (BACKENDS, BYTES, range(1, 577), ("decode", "prefill"), (True, False))
    found = {}
    for target, kind, head_size, phase, aligned in itertools.product(*axes):
        taken = module.attention_tiles(
            Target(target, BACKENDS[target], "", 0, 1),
            head_size,
            4,
            *BYTES[kind],
            decode=phase == "decode",
            aligned=aligned,
        )
        tile = (taken.tile_m, taken.tile_n, taken.num_warps, taken.num_stages)
        found[target, kind, head_size, phase, aligned] = tile
    return found


Expected = dict[tuple[str, str, str, Tile], range]
CASES: dict[str, tuple[list[dict], Expected]] = {
    "row": ([{}], {("sm_90", "16-bit", "decode", FAST): range(1, 129)}),
    "new-row": (
        [{"head_size": 96, "phase": "prefill"}],
        {("sm_90", "16-bit", "prefill", FAST): range(1, 97)},
    ),
    "between": (
        [{"head_size": 160, "kind": "32-bit", "target": "sm_80"}],
        {("sm_80", "32-bit", "decode", FAST): range(129, 161)},
    ),
    "new-target": (
        [{"head_size": 64, "kind": "fp8 cache", "target": "sm_89"}],
        {("sm_89", "fp8 cache", "decode", FAST): range(1, 65)},
    ),
    "hip": (
        [{"head_size": 576, "target": "gfx942", "phase": "prefill"}],
        {("gfx942", "16-bit", "prefill", FAST): range(257, 577)},
    ),
    "both-phases": (
        [{"head_size": 80}, {"head_size": 80, "phase": "prefill", "tile": OTHER}],
        {
            ("sm_90", "16-bit", "decode", FAST): range(1, 81),
            ("sm_90", "16-bit", "prefill", OTHER): range(1, 81),
        },
    ),
    "neighbours": (
        [{}, {"head_size": 96, "tile": OTHER}, {"kind": "32-bit"}],
        {
            ("sm_90", "16-bit", "decode", OTHER): range(1, 97),
            ("sm_90", "16-bit", "decode", FAST): range(97, 129),
            ("sm_90", "32-bit", "decode", FAST): range(97, 129),
        },
    ),
    "other-phase-below": (
        [{"phase": "prefill"}, {"head_size": 96, "tile": OTHER}],
        {
            ("sm_90", "16-bit", "decode", OTHER): range(1, 97),
            ("sm_90", "16-bit", "prefill", FAST): range(97, 129),
        },
    ),
    "kept-neighbour": (
        [{}, {"head_size": 96, "p50_us": 200.0}],
        {("sm_90", "16-bit", "decode", FAST): range(97, 129)},
    ),
}


def sweep_of(parts: list[dict]) -> list[Row]:
    """Default and one tile for each choice."""
    rows = []
    for part in parts:
        options = {name: part[name] for name in part if name not in ("tile", "p50_us")}
        tile, p50_us = part.get("tile", FAST), part.get("p50_us", 50.0)
        rows += [make_row(None, 100.0, **options), make_row(tile, p50_us, **options)]
    return rows


@pytest.mark.parametrize("name", CASES)
def test_a_written_winner_is_the_default_and_all_else_stays(name: str, copy: Path) -> None:
    """Compared for every target, kind, head size, phase and alignment."""
    parts, expected = CASES[name]
    winners = choose_tiles(sweep_of(parts))
    old = copy.read_text()
    lines = write_tiles(winners, copy)
    wanted = all_tiles(launch)
    for (target, kind, phase, tile), sizes in expected.items():
        wanted.update({(target, kind, size, phase, True): tile for size in sizes})
        said = f'("{target}", "{kind}"): {tile} for {phase}, '
        assert f"{said}heads of {sizes[0]} to {sizes[-1]} lanes" in lines
    assert all_tiles(imported(copy)) == wanted
    new = copy.read_text()
    comments = [line for line in old.splitlines() if line.lstrip().startswith("#")]
    assert [line for line in new.splitlines() if line.lstrip().startswith("#")] == comments
    ruff = [sys.executable, "-m", "ruff", "format", "--check", "--config", ROOT / "pyproject.toml"]
    subprocess.run([*ruff, copy], check=True, capture_output=True)
    assert write_tiles(winners, copy) == []
    assert copy.read_text() == new


def test_the_present_table_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "launch.py"
    path.write_bytes(tiles.LAUNCH.read_bytes())
    old = imported(path)
    row = {"target": "sm_89", "head_size": 16, "tile": (256, 256, 16, 7)}
    write_tiles(choose_tiles(sweep_of([row])), path)
    new, key = imported(path), ("sm_89", "16-bit")
    (first, *rows), before = new._ATTENTION_TILES[key], old._ATTENTION_TILES
    same = before.get(key, before["cuda", "16-bit"])
    assert first == (16, (256, 256, 16, 7), same[0][2])
    assert rows in (same, same[1:])
    same_but_one = before | {key: [first, *rows]}
    assert same_but_one == new._ATTENTION_TILES


def test_comments_inside_the_table_survive(copy: Path) -> None:
    """And the offsets count bytes, not characters."""
    source = copy.read_text()
    row = "        (128, (16, 64, 2, 3), (64, 64, 4, 3)),\n"
    commented = f"        # µ: a reason\n{row[:-1]}  # tied\n"
    copy.write_text(source.replace(row, commented).replace("import math", "import math  # µµ"))
    write_tiles(choose_tiles(sweep_of([{}, {"head_size": 64, "tile": OTHER}])), copy)
    assert (
        "        # µ: a reason\n"
        "        (64, (128, 16, 4, 1), (64, 64, 4, 3)),\n"
        "        (128, (32, 128, 8, 4), (64, 64, 4, 3)),  # tied\n"
    ) in copy.read_text()


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([make_row(None, 100.0), make_row(FAST, 99.0)], "below 2%"),
        ([make_row(None, 100.0, group=32), make_row(FAST, 99.0, group=32)], "below 2%"),
        (
            [make_row(None, 100.0, head_size=100), make_row(FAST, 10.0, head_size=100)],
            "unaligned heads take the tiles of another table",
        ),
        ([make_row(FAST, 10.0)], "the default was not timed"),
    ],
    ids=["noise", "many-heads", "unaligned", "no-default"],
)
def test_nothing_is_written_where_the_default_stays(
    rows: list[Row], verdict: str, copy: Path
) -> None:
    old = copy.stat()
    winners = choose_tiles(rows)
    assert [winner.kept for winner in winners] == [f"keep: {verdict}"]
    assert write_tiles(winners, copy) == []
    assert copy.stat() == old


def test_a_file_without_the_table_is_refused(copy: Path) -> None:
    copy.write_text("_ATTENTION_TILES = None\n")
    with pytest.raises(InputError, match="no literal _ATTENTION_TILES"):
        write_tiles(choose_tiles(sweep_of([{}])), copy)


@pytest.fixture
def command(
    tmp_path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Iterator[Callable[..., str]]:
    """Runs the command line on a folder of these rows, and returns what it printed."""
    monkeypatch.setattr(tiles, "LAUNCH", copy)

    def run(rows: list[Row], *options: str) -> str:
        folder = tmp_path / "sweep"
        for row in rows:
            ResultsFolder(folder).write_row(row)
        monkeypatch.setattr(sys, "argv", ["tiles", str(folder), *options])
        tiles.main()
        return capsys.readouterr().out

    return run


def test_the_command_prints_and_writes(command: Callable[..., str], copy: Path) -> None:
    old = copy.read_bytes()
    rows = [*sweep_of([{}]), make_row(OTHER, None)]
    table = command(rows)
    assert copy.read_bytes() == old
    assert table.endswith("replace\n1 of 3 rows are not ok and were left out.\n")
    assert command(rows, "--write") == (
        f'{table}{copy}:\n("sm_90", "16-bit"): {FAST} for decode, heads of 1 to 128 lanes\n'
    )
    assert copy.read_bytes() != old
    assert command(rows, "--write") == f"{table}Nothing to write.\n"


def test_the_command_says_what_is_wrong(command: Callable[..., str]) -> None:
    with pytest.raises(SystemExit, match=r"error: .*holds no rows"):
        command([])
    with pytest.raises(SystemExit, match=r"error: .*not measured on a GPU"):
        command([make_row(FAST, 1.0, measured="predicted")], "--write")
