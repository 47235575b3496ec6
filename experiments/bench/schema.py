"""Makes the configuration known to Hydra: the app's schema, and the shapes as a config group."""

from hydra.core.config_store import ConfigStore

from ..config import register as register_groups
from .config import BenchConfig
from .shapes import SHAPES


def register() -> None:
    """Store the app's schema, and `operation=NAME` for each shape."""
    register_groups()
    store = ConfigStore.instance()
    store.store(name="bench_schema", node=BenchConfig)
    for name, shape in SHAPES.items():
        store.store(group="operation", name=name, node=shape)
