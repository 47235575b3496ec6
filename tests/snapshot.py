"""What "nothing was changed" means: every array and list of a manager or allocator, as bytes."""

import numpy as np

_SKIPPED = {"hasher", "_tiled_keys"}  # caches of pure functions


def snapshot(root: object) -> dict[str, object]:
    """Return the state below `root`, by path. Two snapshots are equal if nothing has changed.

    Unused columns of the block tables don't count: making room changes no content.
    """
    state: dict[str, object] = {}
    _visit(root, "", state, set())
    return state


def _visit(value: object, path: str, state: dict[str, object], seen: set[int]) -> None:
    if isinstance(value, np.ndarray):
        if path.endswith(".block_tables"):
            used = (value >= 0).any(axis=0).nonzero()[0].max(initial=-1) + 1
            value = value[:, :used]
        state[path] = (value.shape, value.tobytes())
    elif isinstance(value, (list, tuple)):
        state[path] = len(value)
        for i, item in enumerate(value):
            _visit(item, f"{path}[{i}]", state, seen)
    elif isinstance(value, dict):
        state[path] = list(map(repr, value))
        for key, item in value.items():
            _visit(item, f"{path}[{key!r}]", state, seen)
    elif type(value).__module__.startswith("cache.") and not hasattr(type(value), "__members__"):
        if id(value) in seen:
            return
        seen.add(id(value))
        names = list(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            names += [n for n in getattr(kind, "__slots__", ()) if hasattr(value, n)]
        for name in names:
            if name not in _SKIPPED:
                _visit(getattr(value, name), f"{path}.{name}", state, seen)
    else:
        state[path] = repr(value)


def assert_unchanged(root: object, before: dict[str, object]) -> None:
    """Fail, naming what differs, unless `root` is as it was."""
    after = snapshot(root)
    changed = [p for p in before.keys() | after.keys() if before.get(p) != after.get(p)]
    assert not changed, f"changed: {sorted(changed)}"
