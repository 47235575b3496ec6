"""Which blocks are to be copied before the next step writes."""

import numpy as np


class CopyOnWriteTracker:
    """The (source, destination) pairs recorded since the last drain, in order."""

    def __init__(self) -> None:
        self._source_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    def record(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Add pairs. A destination that has a pending pair keeps that one.

        A source that itself waits for a copy is replaced by that copy's source, so that all copies
        can be made at once.
        """
        for destination, source in zip(destinations.tolist(), sources.tolist(), strict=True):
            source = self._source_of.get(source, source)
            self._source_of.setdefault(destination, source)

    def withdraw(self, block_ids: np.ndarray) -> None:
        """Forget the pairs whose destination is given back."""
        if self._source_of:
            for block_id in block_ids.tolist():
                self._source_of.pop(block_id, None)

    def destinations(self) -> list[int]:
        """The blocks that a pending copy will write."""
        return list(self._source_of)

    def drain(self) -> np.ndarray:
        """Return and forget all pairs, int64 [n, 2]."""
        if not self._source_of:
            return np.zeros((0, 2), dtype=np.int64)
        pairs = np.array(
            [(source, destination) for destination, source in self._source_of.items()],
            dtype=np.int64,
        ).reshape(-1, 2)
        self._source_of.clear()
        return pairs
