"""Where results live: one folder a sweep, one JSON file a point, written when the point ends.

    DIR/sweep.json          what was swept over which base configuration, by which code
    DIR/rows/<hash>.json    one point: swept values, metrics, status, provenance, occupancy

A folder takes points of one sweep only. Run again, it keeps its finished points and repeats failed
ones; a point interrupted halfway has no row. Files appear whole or not at all, so points may run
in parallel processes and be killed at any time.
"""

import functools
import hashlib
import json
import logging
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .ranges import InputError

# Rows are also written where Hydra is not installed, so only what runs in its jobs imports it.
if TYPE_CHECKING:
    from omegaconf import DictConfig

MANIFEST = "sweep.json"
ROW_KEYS = {"config_hash", "swept", "status"}
NOT_IDENTITY = ("hydra", "fail_fast")
"""Top-level keys that change how a sweep runs, not what a point measures."""
REPOSITORY = Path(__file__).resolve().parent.parent
CODE = ("cache", "kernels", "experiments")
"""Packages whose source decides what a point measures."""
PACKAGES = ("numpy", "hydra-core", "omegaconf", "torch", "triton", "transformers")

log = logging.getLogger(__name__)
Row = dict[str, Any]


class ForeignFolderError(InputError):
    """The folder holds something other than results of this sweep."""


class AbsentError(InputError):
    """What was to be measured is not here; its row says so, and the sweep has not failed."""


@dataclass(frozen=True)
class Measurement:
    """What a point yields: numbers with units in their names, and time series of equal length.

    `suspect` says why the numbers can't be right, and is empty where nothing speaks against them.
    `notes` are words that belong to the numbers, such as the device's name.
    """

    metrics: dict[str, float | int]
    occupancy: dict[str, np.ndarray] = field(default_factory=dict)
    suspect: str = ""
    notes: dict[str, str] = field(default_factory=dict)


@functools.cache
def provenance() -> dict[str, str]:
    """What produced a row: commit, hash of the source, and versions."""
    return {"commit": _commit(), "code_hash": _code_hash(), **_versions()}


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _code_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for package in CODE for path in (REPOSITORY / package).rglob("*.py")):
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _commit() -> str:
    """The checked-out commit, with "-dirty" after it for changed files; "unknown" outside git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != REPOSITORY:
            return "unknown"
        dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def plain_config(config: "DictConfig") -> dict[str, Any]:
    """The configuration of a point as JSON-ready values, interpolations resolved."""
    from omegaconf import OmegaConf

    kept = OmegaConf.masked_copy(config, [key for key in config if key not in NOT_IDENTITY])
    return OmegaConf.to_container(kept, resolve=True, enum_to_str=True)


def config_hash(config: dict[str, Any]) -> str:
    """16 hex digits that name a configuration, equal in every process."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a kill at any moment, finds all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


class ResultsFolder:
    """One sweep's folder, or one single run's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, hydra: "DictConfig") -> "ResultsFolder":
        """The folder that a job or a sweep with Hydra's own configuration `hydra` writes to."""
        from hydra.types import RunMode

        chosen = hydra.sweep.dir if hydra.mode is RunMode.MULTIRUN else hydra.run.dir
        return cls(Path(hydra.runtime.cwd) / chosen)

    def claim(self, manifest: dict[str, Any]) -> None:
        """Start the sweep that `manifest` describes here, or go on with it; drop unfinished rows.

        Raises ForeignFolderError, changing nothing, where the folder holds anything else.
        """
        path = self.root / MANIFEST
        if path.exists():
            old = self.manifest() | {"shown": manifest["shown"]}
            differences = list(_differences("", old, manifest))
            if differences:
                raise ForeignFolderError(
                    f"{self.root} holds results of another sweep: {'; '.join(differences[:5])}"
                )
        elif self.root.exists() and any(not p.name.endswith(".tmp") for p in self.root.iterdir()):
            raise ForeignFolderError(f"{self.root} is not empty and holds no {MANIFEST}")
        else:
            write_whole(path, _to_json(manifest))
        for row in self.rows():
            if row["status"] != "ok":
                self._row_path(row["config_hash"]).unlink()

    def manifest(self) -> dict[str, Any]:
        """What `claim` wrote. Raises InputError where this is no results folder."""
        path = self.root / MANIFEST
        if not path.is_file():
            raise InputError(f"{self.root} holds no {MANIFEST}: not a results folder")
        return _read(path, {"swept_keys"})

    def rows(self) -> list[Row]:
        """All rows, sorted by their swept values: numbers by size, before text."""
        rows = [_read(path, ROW_KEYS) for path in (self.root / "rows").glob("[!.]*.json")]
        return sorted(rows, key=lambda row: [_sort_key(v) for v in row["swept"].values()])

    def row(self, config_hash: str) -> Row | None:
        path = self._row_path(config_hash)
        return _read(path, ROW_KEYS) if path.exists() else None

    def write_row(self, row: Row) -> None:
        write_whole(self._row_path(row["config_hash"]), _to_json(row))

    def _row_path(self, config_hash: str) -> Path:
        return self.root / "rows" / f"{config_hash}.json"


def _read(path: Path, keys: set[str]) -> dict[str, Any]:
    """Read a JSON object with these keys. Raises InputError naming the file for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(
            f"{path} is damaged ({error}): remove it to measure its point again"
        ) from None
    if not isinstance(value, dict) or not keys <= value.keys():
        raise InputError(f"{path} is no file of a results folder: it lacks {sorted(keys)[0]!r}")
    return value


def run_point(
    composed: "DictConfig",
    measure: Callable[["DictConfig"], Measurement],
    input_path: str | None = None,
    device: str = "",
) -> float | None:
    """Measure the point that this Hydra job is, and write its row; a finished one is left alone.

    An error becomes a failed row, and is logged here and now; the sweep's end turns it into the
    exit status. Beside the configuration the result may depend on a file, `input_path`, and on the
    `device` of that name.

    Returns the metric by which rows are ranked, for sweepers that search for the best of it, or
    None where there is none.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    hydra = HydraConfig.get()
    rank_by = OmegaConf.select(hydra, "callbacks.results.rank_by")
    folder = ResultsFolder.of(hydra)
    swept_keys = folder.manifest()["swept_keys"]
    row = start_row(
        plain_config(composed),
        {key: _swept_value(key, composed, hydra) for key in swept_keys},
        _digest(input_path),
        device,
    )
    known = folder.row(row["config_hash"])
    if known and known["status"] == "ok" and _same_inputs(known, row):
        log.info("already finished: row %s is kept", row["config_hash"])
        return known["metrics"].get(rank_by)
    if composed.fail_fast and any(other["status"] == "failed" for other in folder.rows()):
        log.warning("not run: an earlier point failed, and fail_fast=true")
        return None
    finish_row(row, lambda: measure(composed))
    folder.write_row(row)
    return row["metrics"].get(rank_by)


def _same_inputs(known: Row, row: Row) -> bool:
    return all(known.get(key) == row[key] for key in ("input_sha256", "device"))


def start_row(
    config: dict[str, Any], swept: dict[str, Any], input_sha256: str | None, device: str
) -> Row:
    """What is known of a point before it is measured."""
    return {
        "config_hash": config_hash(config),
        "swept": swept,
        "seed": config["seed"],
        "input_sha256": input_sha256,
        "device": device,
        "provenance": provenance(),
        "config": config,
    }


def finish_row(row: Row, measure: Callable[[], Measurement]) -> None:
    """Measure, and add to `row` what came out, an error too, which is logged here.

    Status: ok; failed; absent, where there is nothing to measure; suspect, where the numbers can't
    be right.
    """
    start = time.perf_counter()
    try:
        measured = measure()
        status = "suspect" if measured.suspect else "ok"
        row |= {"status": status, "message": measured.suspect}
    except AbsentError as error:
        measured = Measurement({})
        row |= {"status": "absent", "message": str(error)}
    except Exception as error:
        measured = Measurement({})
        row |= {"status": "failed", "message": f"{type(error).__name__}: {error}"}
        # The message of a user's mistake says it all; anything else needs its traceback.
        log.error(
            row["message"], exc_info=not isinstance(error, InputError | OSError | MemoryError)
        )
    row |= {
        "wall_s": round(time.perf_counter() - start, 3),
        "metrics": measured.metrics,
        "notes": measured.notes,
        "occupancy": measured.occupancy,
    }


def _swept_value(key: str, composed: "DictConfig", hydra: "DictConfig") -> Any:
    """The value of a swept key in this job: the chosen file of a config group, or the value."""
    from omegaconf import OmegaConf

    if key in hydra.runtime.choices:
        return hydra.runtime.choices[key]
    value = OmegaConf.select(composed, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _digest(path: str | None) -> str | None:
    """SHA-256 of a file, or None where there is none to read."""
    if path is None or not Path(path).is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_json(value: Any) -> bytes:
    # Arrays and numpy scalars both have tolist.
    return json.dumps(value, indent=1, default=lambda item: item.tolist()).encode()


def _sort_key(value: Any) -> tuple[bool, Any]:
    is_number = isinstance(value, int | float)
    return (not is_number, value if is_number else str(value))


def _differences(prefix: str, old: Any, new: Any) -> Iterator[str]:
    """Each leaf in which two JSON values differ, as "key was OLD, now NEW"."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from _differences(f"{prefix}{key}.", old.get(key), new.get(key))
    elif old != new:
        yield f"{prefix.rstrip('.')} was {old}, now {new}"
