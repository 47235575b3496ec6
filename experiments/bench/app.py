"""The Hydra app. See the package's docstring."""

import functools
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ..config import refuse_padded_numbers, to_object
from ..results import Measurement, run_point
from .config import BenchConfig, DeviceName
from .measuring import Bench, choose_device, device_name
from .schema import register

CONFIGS = str(Path(__file__).resolve().parent.parent.parent / "configs")

register()


@hydra.main(config_path=CONFIGS, config_name="bench", version_base="1.3")
def main(composed: DictConfig) -> float | None:
    """Run one point of a sweep, or a single run. Returns what `run_point` does."""
    return run_point(composed, measure, device=device_name(composed.device))


def measure(composed: DictConfig) -> Measurement:
    """Validate the configuration and measure what it describes."""
    refuse_padded_numbers(HydraConfig.get().overrides.task)
    config: BenchConfig = to_object(composed)
    return _bench(choose_device(config.device)).measure(config)


@functools.lru_cache(maxsize=1)
def _bench(chosen: DeviceName) -> Bench:
    """One for all points of a sweep, which share inputs and ceilings."""
    return Bench(chosen)


if __name__ == "__main__":
    main()
