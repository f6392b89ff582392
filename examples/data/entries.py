"""Entries of the JSON files beside token shards; a wrong one is named."""

import dataclasses
from dataclasses import dataclass
from typing import Any

_DTYPES = ("<u2", "<u4")
_SPLITS = ("train", "val", "val_bytes")


@dataclass(frozen=True)
class Shard:
    """One file: what is in it, and its checksum."""

    name: str
    split: str
    dtype: str
    documents: int
    bytes: int
    tokens: int
    sha256: str


def _wrong(place: str, value: Any, wanted: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ValueError(f"{place} is {shown}, not {wanted}")


def entry(content: Any, key: str, kind: Any, place: str = "") -> Any:
    """`content[key]`, which must be a `kind`; numbers are never negative."""
    if not isinstance(content, dict):
        raise _wrong(place or "the file", content, "an object")
    path = f"{place}.{key}" if place else key
    if key not in content:
        raise ValueError(f"{path} is missing")
    value = content[key]
    if type(value) is not kind or (kind is int and value < 0):
        words = {int: "a number", str: "a text", list: "a list", dict: "an object"}
        raise _wrong(path, value, words[kind])
    return value


def shard_entries(content: Any) -> tuple[Shard, ...]:
    """The entry `shards` of an index or of a preparation's progress."""
    fields = {field.name: field.type for field in dataclasses.fields(Shard)}
    found = []
    for number, record in enumerate(entry(content, "shards", list)):
        place = f"shards[{number}]"
        shard = Shard(
            **{k: entry(record, k, kind, place) for k, kind in fields.items()}
        )
        if shard.dtype not in _DTYPES:
            raise _wrong(f"{place}.dtype", shard.dtype, " or ".join(_DTYPES))
        if shard.split not in _SPLITS:
            raise _wrong(f"{place}.split", shard.split, " or ".join(_SPLITS))
        if not shard.tokens:
            raise _wrong(f"{place}.tokens", 0, "a number above 0")
        if shard.name in ("", ".", "..") or set(shard.name) & set("/\\\0"):
            raise _wrong(f"{place}.name", shard.name, "the name of a file")
        found.append(shard)
    return tuple(found)
