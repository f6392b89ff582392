"""Command lines built from frozen dataclasses, and errors that are one line.

Every field declared with `option` becomes one flag: `weight_decay` is
`--weight-decay`.
This module imports neither JAX nor NumPy, so that a bad option is reported at once.
"""

import argparse
import dataclasses
import math
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn


class UserError(ValueError):
    """Something the user can put right; shown as one line, exit code 2."""


def failed(command: str, error: BaseException | str, code: int = 2) -> int:
    """Shows an error as one line, whatever a library put in it; gives the exit code."""
    print(f"{command}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def option(default: Any, text: str, *, bare: Any = None) -> Any:
    """A dataclass field that is also a command-line flag with a help text.

    Args:
      default: the value without the flag.
      text: what `--help` says.
      bare: the value of the flag written without one; None: it must have one.
    """
    return dataclasses.field(default=default, metadata={"help": text, "bare": bare})


def check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def check_range(
    owner: Any, name: str, low: float, high: float = math.inf, *, open_low: bool = False
) -> None:
    """Check one numeric field; None (meaning "use the default") always passes."""
    value = getattr(owner, name)
    if value is None:
        return
    above = value > low if open_low else value >= low
    flag = "--" + name.replace("_", "-")
    bounds = f"{'above' if open_low else 'at least'} {low:g}"
    if high != math.inf:
        bounds += f" and at most {high:g}"
    check(
        math.isfinite(value) and above and value <= high,
        f"{flag} must be {bounds}, got {value}",
    )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from a file is of a field's type."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(v, str) for v in value)
    if hint in (int, float):  # of which bool is a kind, and int is as good as a float
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, hint)


def check_types(section: type, values: Mapping[str, Any]) -> None:
    """`UserError` if values for some fields of a section are not of their types."""
    hints = typing.get_type_hints(section)
    for name, value in values.items():
        check(_fits(value, hints[name]), f"{name} cannot be {value!r:.50}")


class _Parser(argparse.ArgumentParser):
    """argparse prints a usage text and exits; one line is enough for our users."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _flag_kwargs(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Translate one dataclass field into the keywords of `add_argument`."""
    if isinstance(hint, types.UnionType):  # X | None: the flag itself takes an X
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    shown = "" if field.default in (None, ()) else f" [{field.default}]"
    text = field.metadata["help"].replace("%", "%%") + shown
    kwargs: dict[str, Any] = {"help": text, "default": field.default}
    if hint is bool:
        kwargs["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(hint) is Literal:
        kwargs["choices"] = typing.get_args(hint)
        if field.metadata.get("bare") is not None:
            kwargs |= {"nargs": "?", "const": field.metadata["bare"]}
    elif typing.get_origin(hint) is tuple:
        kwargs |= {"nargs": "+", "metavar": "PATH"}
    else:
        kwargs |= {"type": hint, "metavar": hint.__name__.upper()}
    return kwargs


def parse(
    sections: Mapping[str, type],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One instance of each section; `UserError`, of one line, for a bad option.

    Args:
      sections: name to dataclass.
      argv: the words of the command line; None: those of this process.
      prog: name of the program, for its help.
      description: what it does, for its help.
      defaults: values by field that take the place of the declared defaults.
    """
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    for name, section in sections.items():
        group = parser.add_argument_group(name, (section.__doc__ or "").split("\n")[0])
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            flag = "--" + field.name.replace("_", "-")
            group.add_argument(flag, **_flag_kwargs(field, hints[field.name]))
    parser.set_defaults(**(defaults or {}))
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in vars(parser.parse_args(argv)).items()
    }
    return {
        name: section(**{f.name: values[f.name] for f in dataclasses.fields(section)})
        for name, section in sections.items()
    }
