"""A shuffled order that is a formula: no memory, no state, the same on every host.

A balanced Feistel network permutes the numbers of an even count of bits whatever its
round function is (M. Luby and C. Rackoff, 1988); numbers that leave the range are sent
through again until they return ("cycle walking", J. Black and P. Rogaway, 2002), which
makes it a permutation of any range. Where training stopped is then the step number and
nothing else. Grain's samplers would have to be saved and restored instead, and its
worker processes have no work to do where a record is a slice of a mapped file.
"""

import numpy as np

_ROUNDS = 8


def _mix(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """A hash of 64 bits: the finalizer of SplitMix64 (Steele et al., 2014)."""
    x = (x ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where the places `index` of an epoch's order point to, all within range(size)."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        return (left << half) | right

    value = once(np.asarray(index, np.uint64))
    while (outside := value >= size).any():
        value[outside] = once(value[outside])
    return value.astype(np.int64)
