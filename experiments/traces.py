"""Readers of recorded traces, plain or .gz, line by line; a malformed line is named."""

import gzip
import itertools
import json
import math
import zlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from .config import TraceConfig
from .ranges import InputError
from .requests import Request, Segment, Workload

MOONCAKE_TOKENS_PER_ID = 512


class _Trace(Workload):
    """Reads records line by line; `_records` yields (line number, seconds, request fields)."""

    def __init__(self, config: TraceConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.path = Path(config.path).expanduser()
        if not self.path.is_file():
            raise InputError(f"workload.path={config.path}: no such file, seen from {Path.cwd()}")
        super().__init__(config.name, sum(1 for _ in self))
        if not self.num_requests:
            raise InputError(f"{self.path}: no request in this trace")

    def _records(self) -> Iterator[tuple[int, float, dict[str, Any]]]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Request]:
        first = previous = None
        records = itertools.islice(self._records(), self.config.num_requests)
        for request_id, (line, seconds, request) in enumerate(records):
            first = seconds if first is None else first
            if previous is not None and seconds < previous:
                raise InputError(
                    f"{self.path}:{line}: timestamp goes back by {previous - seconds:g} s"
                )
            previous = seconds
            arrival_s = (seconds - first) / self.config.rate_scale
            yield Request(request_id, arrival_s, seed=self.seed, **request)


class MooncakeTrace(_Trace):
    """Mooncake JSONL; prompts share what their leading hash ids share."""

    def _records(self) -> Iterator[tuple[int, float, dict[str, Any]]]:
        for line, text in _numbered_lines(self.path):
            try:
                yield line, *_mooncake_record(text)
            except InputError as error:
                raise InputError(f"{self.path}:{line}: {error}") from None


def _mooncake_record(text: str) -> tuple[float, dict[str, Any]]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise InputError(f"not a JSON object ({error}): {text[:60]!r}") from None
    if not isinstance(record, dict):
        raise InputError(f"not a JSON object: {text[:60]!r}")
    for key in ("timestamp", "input_length", "output_length", "hash_ids"):
        if key not in record:
            raise InputError(f"no {key!r} in {text[:60]!r}")
    num_prompt_tokens = _length("input_length", record["input_length"])
    ids = record["hash_ids"]
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 2**62 for i in ids):
        raise InputError(f"hash_ids must be a list of numbers >= 0, got {str(ids)[:60]}")
    num_ids = -(-num_prompt_tokens // MOONCAKE_TOKENS_PER_ID)
    if len(ids) != num_ids:
        raise InputError(
            f"input_length {num_prompt_tokens} needs {num_ids} hash_ids of "
            f"{MOONCAKE_TOKENS_PER_ID} tokens, got {len(ids)}"
        )
    segments = [Segment(i, MOONCAKE_TOKENS_PER_ID) for i in ids]
    last = num_prompt_tokens - (num_ids - 1) * MOONCAKE_TOKENS_PER_ID
    segments[-1] = Segment(ids[-1], last)
    timestamp = record["timestamp"]
    if type(timestamp) not in (int, float) or not math.isfinite(timestamp):
        raise InputError(f"timestamp must be a number of milliseconds, got {timestamp!r}")
    return timestamp / 1000, {
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": _length("output_length", record["output_length"]),
        "segments": tuple(segments),
    }


class AzureTrace(_Trace):
    """Azure LLM inference CSV: lengths without content, so no prompt shares anything."""

    COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def _records(self) -> Iterator[tuple[int, float, dict[str, Any]]]:
        lines = _numbered_lines(self.path)
        line, header = next(lines, (1, ""))
        if tuple(header.split(",")) != self.COLUMNS:
            raise InputError(
                f"{self.path}:{line}: expected the header {','.join(self.COLUMNS)}, "
                f"got {header[:60]!r}"
            )
        for line, text in lines:
            try:
                yield line, *_azure_record(text)
            except InputError as error:
                raise InputError(f"{self.path}:{line}: {error}") from None


def _azure_record(text: str) -> tuple[float, dict[str, Any]]:
    cells = text.split(",")
    if len(cells) != len(AzureTrace.COLUMNS):
        raise InputError(f"expected {len(AzureTrace.COLUMNS)} columns, got {text[:60]!r}")
    try:
        moment = datetime.fromisoformat(cells[0])
    except ValueError:
        raise InputError(f"TIMESTAMP is not a date and time: {cells[0]!r}") from None
    # Unlike timestamp(), a difference of naive datetimes knows no daylight saving time; a start
    # nearby keeps microseconds exact in a float.
    seconds = (moment.replace(tzinfo=None) - datetime(2020, 1, 1)).total_seconds()
    lengths = [int(cell) if cell.isdecimal() else cell for cell in cells[1:]]
    return seconds, {
        "num_prompt_tokens": _length("ContextTokens", lengths[0]),
        "num_output_tokens": _length("GeneratedTokens", lengths[1]),
    }


def _length(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise InputError(f"{key} must be a number of tokens >= 1, got {value!r}")
    return value


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, plain or .gz, with their numbers from 1; blank ones left out."""
    line = 0
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line, text in enumerate(file, start=1):
                if text := text.strip():
                    yield line, text
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path}:{line + 1}: cannot be read on: {error}") from error
