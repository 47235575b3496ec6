"""The Hydra callback that claims a results folder first and ends it in a table and a report.

Hydra turns exceptions in callbacks into warnings, so what must stop the run leaves by SystemExit.
"""

import logging
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from tqdm import tqdm

from .ranges import InputError
from .results import ResultsFolder, plain_config, provenance

log = logging.getLogger(__name__)


class ConsoleHandler(logging.StreamHandler):
    """Writes log lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=self.stream)


class Sweep(NamedTuple):
    """What is swept, and what the sweeper fixes beside the composed configuration."""

    swept_keys: list[str]
    fixed: dict[str, str]
    num_points: int
    """Combinations of the swept values, intervals left out."""


def parse_sweep(params: Mapping[str, object], overrides: Iterable[str]) -> Sweep:
    """Read the sweeper's `params` and the command line's `overrides`, which replace them.

    `fixed` holds params with one value: unlike overrides, they are not in the composed
    configuration.
    """
    parser = OverridesParser.create()
    by_key = {o.get_key_element(): o for o in parser.parse_overrides(list(overrides))}
    from_params = parser.parse_overrides([f"{key}={value}" for key, value in params.items()])
    replaced = {o.get_key_element(): o for o in from_params} | by_key
    swept = {key: o for key, o in replaced.items() if o.is_sweep_override()}
    fixed = {
        key: o.get_value_element_as_str()
        for key, o in replaced.items()
        if key not in swept and key not in by_key
    }
    finite = [o for o in swept.values() if not o.is_interval_sweep()]
    counts = [len(list(o.sweep_iterator())) for o in finite]
    return Sweep(list(swept), fixed, math.prod(counts))


class Results(Callback):
    """Results of a run or a sweep, from the first look at the folder to the exit status.

    `rank_by` names the metric of which the best row has most; `columns` the metrics shown in the
    printed table.
    """

    def __init__(self, rank_by: str, columns: list[str]) -> None:
        self.shown = {"rank_by": rank_by, "columns": list(columns)}
        self.bar: tqdm | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Launchers send callbacks to other processes, where a progress bar can't go.
        return Results, tuple(self.shown.values())

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._claim(config, Sweep([], {}, 1))

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        self._finish(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        params = config.hydra.sweeper.get("params") or {}
        sweep = parse_sweep(params, config.hydra.overrides.task)
        self._claim(config, sweep)
        # A sweeper that searches says how many points it will try.
        total = config.hydra.sweeper.get("n_trials") or sweep.num_points
        self.bar = tqdm(total=total, desc="sweep", unit="point", disable=None)

    def on_job_end(self, config: DictConfig, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.close()
        self._finish(config)

    def _claim(self, config: DictConfig, sweep: Sweep) -> None:
        folder = ResultsFolder.of(config.hydra)
        versions = {key: text for key, text in provenance().items() if key != "commit"}
        manifest = {
            "app": config.hydra.job.name,
            "swept_keys": sweep.swept_keys,
            "fixed": sweep.fixed,
            "config": plain_config(config),
            "provenance": versions,
            "shown": self.shown,
        }
        try:
            folder.claim(manifest)
        except (InputError, OSError) as error:
            sys.exit(f"error: {error}; choose another hydra.run.dir or hydra.sweep.dir")

    def _finish(self, config: DictConfig) -> None:
        """Write the report, print its summary; exit with 1 where a point failed or is suspect."""
        # Only now: plotting libraries take longer to import than a refused configuration to show.
        from .report import write_report

        folder = ResultsFolder.of(config.hydra)
        try:
            summary = write_report(folder)
        except Exception:
            log.exception("the report could not be written; its rows are in %s", folder.root)
            sys.exit(1)
        print(summary)
        if any(row["status"] in ("failed", "suspect") for row in folder.rows()):
            sys.exit(1)
