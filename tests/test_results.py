"""Rows on disk: whole files, one sweep a folder, hashes that name configurations."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from experiments import results
from experiments.callbacks import Results
from experiments.config import ServeConfig
from experiments.ranges import InputError
from experiments.results import (
    ForeignFolderError,
    ResultsFolder,
    Row,
    config_hash,
    plain_config,
    write_whole,
)

MANIFEST = {"app": "serve", "swept_keys": ["a"], "config": {"b": {"c": 1}}, "shown": {}}


def row(name: str, status: str = "ok", **swept: object) -> Row:
    return {"config_hash": name, "status": status, "swept": swept}


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    folder = ResultsFolder(tmp_path / "out")
    folder.claim(MANIFEST)
    return folder


def test_a_file_that_cannot_be_finished_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "row.json"
    write_whole(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(results.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_file_left_by_a_killed_writer_is_no_row(folder: ResultsFolder) -> None:
    folder.write_row(row("1", a=1))
    (folder.root / "rows" / ".2.json.99.tmp").write_text('{"status"')
    assert [r["config_hash"] for r in folder.rows()] == ["1"]
    folder.claim(MANIFEST)


def test_a_folder_left_by_a_kill_before_its_manifest_can_be_claimed(tmp_path: Path) -> None:
    (tmp_path / ".sweep.json.99.tmp").write_text("{")
    ResultsFolder(tmp_path).claim(MANIFEST)
    assert ResultsFolder(tmp_path).manifest() == MANIFEST


def test_rows_are_sorted_by_value_and_numbers_come_before_text(folder: ResultsFolder) -> None:
    for name, value in enumerate(["auto", 128, 16, 8.5, "all"]):
        folder.write_row(row(str(name), a=value))
    assert [r["swept"]["a"] for r in folder.rows()] == [8.5, 16, 128, "all", "auto"]


def test_numpy_values_become_plain_json(folder: ResultsFolder) -> None:
    folder.write_row(row("1", a=1) | {"x": np.float64(0.5), "y": np.arange(3), "z": np.int64(7)})
    stored = folder.row("1")
    assert (stored["x"], stored["y"], stored["z"]) == (0.5, [0, 1, 2], 7)
    assert folder.row("2") is None


def test_claiming_again_keeps_finished_rows_and_drops_failed_ones(folder: ResultsFolder) -> None:
    folder.write_row(row("1", a=1))
    folder.write_row(row("2", "failed", a=2))
    folder.claim(MANIFEST | {"shown": {"rank_by": "another metric"}})
    assert [r["config_hash"] for r in folder.rows()] == ["1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"app": "replay"}, "app was serve, now replay"),
        ({"swept_keys": ["a", "d"]}, r"swept_keys was \['a'\], now \['a', 'd'\]"),
        ({"config": {"b": {"c": 2}}}, "config.b.c was 1, now 2"),
        ({"config": {"b": {"c": 1, "d": 3}}}, "config.b.d was None, now 3"),
    ],
)
def test_another_sweep_is_refused_and_loses_nothing(
    folder: ResultsFolder, change: dict, message: str
) -> None:
    """E05: the message names what differs; even failed rows are left alone."""
    folder.write_row(row("2", "failed", a=2))
    with pytest.raises(ForeignFolderError, match=message):
        folder.claim(MANIFEST | change)
    assert folder.manifest() == MANIFEST
    assert len(folder.rows()) == 1


def test_a_folder_without_manifest_is_no_results_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no sweep\.json"):
        ResultsFolder(tmp_path).manifest()


def test_a_hash_names_what_is_measured_and_not_how_the_sweep_runs() -> None:
    config = OmegaConf.structured(ServeConfig)
    base = config_hash(plain_config(config))
    config.fail_fast = True
    assert config_hash(plain_config(config)) == base
    config.cache.watermark = 0.5
    assert config_hash(plain_config(config)) != base
    assert config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1})
    assert plain_config(config)["scheduler"]["preemption"] == "recompute"


def test_provenance_is_complete() -> None:
    made_by = results.provenance()
    assert {"commit", "code_hash", "python", *results.PACKAGES} == set(made_by)
    assert all(made_by.values())


def test_provenance_outside_a_checkout_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy inside somebody else's repository must not claim that one's commit."""
    monkeypatch.setattr(results, "REPOSITORY", Path(results.REPOSITORY) / "experiments")
    assert results._commit() == "unknown"
    monkeypatch.setattr(results, "REPOSITORY", tmp_path)
    assert results._commit() == "unknown"


def test_the_code_hash_follows_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "REPOSITORY", tmp_path)
    (tmp_path / "cache").mkdir()
    hashes = {results._code_hash()}
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "cache" / "pool.py").write_text(text)
        hashes.add(results._code_hash())
    (tmp_path / "cache" / "notes.txt").write_text("no code")
    assert results._code_hash() in hashes
    assert len(hashes) == 3


def test_the_callback_travels_to_other_processes() -> None:
    """Launchers pickle callbacks; a progress bar's stream can't be pickled."""
    callback = Results("ttft_p50_s", ["ttft_p50_s"])
    callback.bar = open(__file__)  # noqa: SIM115
    copy = pickle.loads(pickle.dumps(callback))
    callback.bar.close()
    assert copy.shown == callback.shown
    assert copy.bar is None


@pytest.mark.parametrize("damage", [b"", b'{"swept": 1', b"[]", b"{}"])
@pytest.mark.parametrize("name", ["sweep.json", "rows/ab.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: bytes) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "sweep.json").write_bytes(b'{"swept_keys": []}')
    (tmp_path / name).write_bytes(damage)
    folder = ResultsFolder(tmp_path)
    with pytest.raises(InputError, match=re.escape(name)):
        (folder.manifest(), folder.rows())


def test_a_file_is_no_results_folder() -> None:
    with pytest.raises(InputError, match="not a results folder"):
        ResultsFolder(Path(__file__)).manifest()
