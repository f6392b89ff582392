"""Command lines built from frozen dataclasses, and errors that are one line.

Every field declared with `option` becomes one flag: `weight_decay` is
`--weight-decay`.
This module imports neither JAX nor NumPy, so that a bad option is reported at once.
"""

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Self

_LARGEST = 2**31 - 1  # of whole numbers: steps and token ids are counted in 32 bits


class UserError(ValueError):
    """Something the user can put right; shown as one line.

    The exit code 2 is for options and files, 1 for what failed in the middle of work.
    """

    code = 2


class Interrupted(RuntimeError):
    """A signal ended the work; the exit code is 128 + its number."""

    def __init__(self, number: int, text: str):
        super().__init__(text)
        self.code = 128 + number


def run_command(name: str, run: Callable[[], int | None]) -> int:
    """Run a command and return its exit code, with errors shown as one line.

    Libraries that take long to import are imported inside of `run`, so that Ctrl-C is
    one line then as well.
    """

    def show(error: object, code: int) -> int:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return code

    try:
        return run() or 0
    except UserError as error:
        return show(f"error: {error}", error.code)
    except Interrupted as stopped:
        return show(stopped, stopped.code)
    except KeyboardInterrupt:
        return show("interrupted", 130)


def option(default: Any, text: str, bounds: str = "", *, bare: Any = None) -> Any:
    """A dataclass field that is also a command-line flag with a help text.

    Args:
      default: the value without the flag.
      text: what `--help` says.
      bounds: an interval such as "[0, 1)"; an end that is not allowed has a round
        bracket, and without a number it is that of 32 bits.
      bare: the value of the flag written without one; None: it must have one.
    """
    metadata = {"help": text, "bounds": bounds, "bare": bare}
    return dataclasses.field(default=default, metadata=metadata)


def check(condition: bool, message: str) -> None:
    """`UserError` with a message unless the condition holds."""
    if not condition:
        raise UserError(message)


@dataclasses.dataclass(frozen=True)
class Options:
    """What sections of options inherit: numbers are checked when they are made."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, bounds = getattr(self, field.name), field.metadata.get("bounds")
            if bounds and value is not None:
                low, high = (part.strip() for part in bounds[1:-1].split(","))
                high = high or str(_LARGEST if isinstance(value, int) else 1e38)
                above = value > float(low) or (value == float(low) and bounds[0] == "[")
                below = value < float(high) or (
                    value == float(high) and bounds[-1] == "]"
                )
                said = f"{'at least' if bounds[0] == '[' else 'above'} {low} and "
                said += f"{'at most' if bounds[-1] == ']' else 'below'} {high}"
                flag = "--" + field.name.replace("_", "-")
                check(above and below, f"{flag} must be {said}, got {value}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """An instance from values read from a file, without those of unknown names.

        Raises:
          UserError: a value is not of its field's type, or out of bounds.
        """
        found, hints = {}, typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in values:
                value = values[field.name]
                value = tuple(value) if isinstance(value, list) else value
                wrong = not _fits(value, hints[field.name])
                check(not wrong, f"{field.name} cannot be {value!r:.50}")
                found[field.name] = value
        try:
            return cls(**found)
        except TypeError as error:  # a field without a default is not there
            raise UserError(str(error).partition("() ")[2]) from None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from a file is of a field's type."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        (kind, _) = typing.get_args(hint)
        return isinstance(value, tuple) and all(_fits(item, kind) for item in value)
    if hint in (int, float):  # of which bool is a kind, and int is as good as a float
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, hint)


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
        if field.metadata["bare"] is not None:
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


def parse_one(section: type, argv: Sequence[str] | None, description: str) -> Any:
    """The options of a command that has one section of them."""
    name = section.__name__.removesuffix("Config").lower()
    prog = f"python -m examples.{name}"
    return parse({name: section}, argv, prog=prog, description=description)[name]
