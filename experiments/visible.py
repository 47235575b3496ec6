"""How many keys the tokens of a sequence see: what attention's FLOPs are counted from."""

import numpy as np


def visible_pairs(lengths: np.ndarray | int, window: int) -> np.ndarray | np.int64:
    """(query, key) pairs of the first `lengths` tokens, each seeing up to `window` keys."""
    full = np.minimum(lengths, window)
    return full * (full + 1) // 2 + (lengths - full) * window
