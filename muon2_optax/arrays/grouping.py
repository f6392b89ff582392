"""Splits lists into groups of items that are alike, which then run together."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def run_in_groups(
    items: Sequence[T],
    key: Callable[[T], Hashable],
    fn: Callable[[list[T]], Iterable[R]],
) -> list[R]:
    """Runs ``fn`` once for each key, on all items that have it.

    Args:
      items: any values.
      key: what items must share to run together.
      fn: from a list of items to one result for each, in their order.

    Returns:
      The results in the order of ``items``. Groups run in the order of their first
      items.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(key(item), []).append(i)
    results: dict[int, R] = {}
    for members in groups.values():
        results.update(zip(members, fn([items[i] for i in members]), strict=True))
    return [results[i] for i in range(len(items))]


def consecutive(
    items: Iterable[T], key: Callable[[T], Any], most: Callable[[Any], int]
) -> list[list[T]]:
    """Splits ``items`` where the key changes, into lists of at most ``most(key)``."""
    lists: list[list[T]] = []
    for value, run in itertools.groupby(items, key):
        alike, size = list(run), most(value)
        lists += [alike[i : i + size] for i in range(0, len(alike), size)]
    return lists


def even_size(count: int, most: int) -> int:
    """The size of groups if ``count`` items are split evenly, at most ``most`` each."""
    return -(-count // -(-count // most))
