"""What do block size and watermark do to throughput, TTFT, TPOT, preemptions and hit rate?

    python -m experiments.serve cache.block_size=32
    python -m experiments.serve -m cache.block_size=16,64 cache.watermark=0,0.05
    python -m experiments.serve experiment=block_size_watermark

Each run simulates continuous batching over the real block manager (see `simulator`), and leaves
results.csv, plots and report.html in its output folder, or at the root of a sweep. The same command
with hydra.sweep.dir=FOLDER goes on with the sweep in FOLDER: finished points are kept.
"""

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from .config import refuse_padded_numbers, register, to_serve_config
from .results import Measurement, run_point
from .simulator import simulate
from .workloads import make_workload

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")

register()


@hydra.main(config_path=CONFIGS, config_name="serve", version_base="1.3")
def main(composed: DictConfig) -> float | None:
    """Run one point of a sweep, or a single run. Returns what `run_point` does."""
    path = OmegaConf.select(composed, "workload.path", throw_on_missing=False, default=None)
    return run_point(composed, measure, input_path=path)


def measure(composed: DictConfig) -> Measurement:
    """Validate the configuration, build its workload and serve it in simulated time."""
    refuse_padded_numbers(HydraConfig.get().overrides.task)
    config = to_serve_config(composed)
    workload = make_workload(config.workload, config.seed)
    result = simulate(workload, config, progress=True)
    return Measurement(result.metrics, result.occupancy)


if __name__ == "__main__":
    main()
