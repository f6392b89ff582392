"""Stacks of matrices that are kept in parts, one after the other along axis 0."""

from collections.abc import Sequence

import jax


def take(parts: Sequence[jax.Array], low: int, high: int) -> list[jax.Array]:
    """Members ``low`` to ``high`` of the whole, as slices of the parts they are in."""
    found, start = [], 0
    for part in parts:
        first, last = max(low - start, 0), min(high - start, len(part))
        if first < last:
            whole = (first, last) == (0, len(part))
            found.append(part if whole else part[first:last])
        start += len(part)
    return found
