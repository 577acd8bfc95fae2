"""Counter-based random numbers: the number at a position of a sequence depends on nothing but its key and the position.

So a sequence draws the same numbers in any batch, on any rank, and after it was suspended, moved or resumed.
"""

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

    counter uint32 [R, 4], key uint32 [R, 2] -> uint32 [R, 4].
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key[:, 0].astype(np.uint64), key[:, 1].astype(np.uint64)
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _WORD) ^ c1 ^ k0, product1 & _LOW, (product0 >> _WORD) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) with 53 random bits for each (key, position). uint64 [R], uint64 [R] -> float64 [R]."""
    zero = np.zeros_like(positions)
    counter = np.stack([positions & _LOW, positions >> _WORD, zero, zero], axis=1).astype(np.uint32)
    key = np.stack([keys & _LOW, keys >> _WORD], axis=1).astype(np.uint32)
    words = philox(counter, key).astype(np.uint64)
    bits = (words[:, 0] << _WORD | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
