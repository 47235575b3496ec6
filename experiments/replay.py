"""What hit rate does a cache of this size, block size and policy reach on this trace?

    python -m experiments.replay workload.path=TRACE evictor=sieve cache.num_gpu_blocks=10000
    python -m experiments.replay workload.path=TRACE experiment=capacity_curve

Only the cache is simulated (see `cache_models`): no clock, no scheduler, no KV. Each run leaves
results.csv, plots and report.html, as `experiments.serve` does.
"""

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from .config import refuse_padded_numbers, register, to_replay_config
from .replayer import Replay
from .results import Measurement, run_point

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")

register()


@hydra.main(config_path=CONFIGS, config_name="replay", version_base="1.3")
def main(composed: DictConfig) -> float | None:
    """Run one point of a sweep, or a single run. Returns what `run_point` does."""
    path = OmegaConf.select(composed, "workload.path", throw_on_missing=False, default=None)
    return run_point(composed, measure, input_path=path)


def measure(composed: DictConfig) -> Measurement:
    """Validate the configuration, read its workload and replay it."""
    refuse_padded_numbers(HydraConfig.get().overrides.task)
    return Measurement(Replay(to_replay_config(composed)).metrics(progress=True))


if __name__ == "__main__":
    main()
