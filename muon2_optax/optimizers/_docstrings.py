"""Docstrings in Google's style as text: taken apart, and their entries written."""

import re
import textwrap
from collections.abc import Mapping


def entry(name: str, text: str) -> str:
    """One entry of Args or Raises, wrapped and indented."""
    return textwrap.fill(
        f"{name}: {text}",
        80,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def split(doc: str) -> tuple[str, dict[str, str], str]:
    """Splits a docstring: what is before Args, its entries by name, what is after.

    Raises:
      ValueError: there is neither Args nor Returns, or nothing comes after Args.
    """
    start = re.search(r"^(Args|Returns):$", doc, re.M)
    if start is None:
        raise ValueError(f"no Args and no Returns in {doc!r}")
    before, rest = doc[: start.start()], doc[start.start() :]
    if start.group() == "Returns:":
        return before.rstrip() + "\n", {}, rest
    end = re.search(r"\n\n(?=\S)", rest)
    if end is None:
        raise ValueError(f"nothing stands after Args in {doc!r}")
    args, after = rest[len("Args:\n") : end.start()], rest[end.end() :]
    entries = re.split(r"\n(?=  \w)", args)
    before = before.rstrip() + "\n"
    return before, {e.strip().split(":")[0]: e for e in entries}, after


def add_errors(after: str, errors: Mapping[str, str]) -> str:
    """Adds errors and their texts at the end of the section Raises.

    Where ``after``, the docstring from Returns on, has no such section, one follows
    Returns.
    """
    shared = [entry(error, text) for error, text in errors.items()]
    found = re.search(r"^Raises:\n", after, re.M)
    if found is not None:
        head, tail = after[: found.end()], after[found.end() :]
        own, rest = tail.split("\n\n", 1)
        return head + "\n".join([own, *shared]) + "\n\n" + rest
    returns, rest = after.split("\n\n", 1) if "\n\n" in after else (after, "")
    return "\n".join([returns.rstrip(), "", "Raises:", *shared, "", rest])
