"""Command lines built from frozen dataclasses, and errors that are one line.

Every field declared with `option` becomes one flag: `weight_decay` is
`--weight-decay`.
This module imports neither JAX nor NumPy, so that a bad option is reported at once.
"""

import argparse
import dataclasses
import io
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

# Of options that would else be ignored: whether they act, given all values by field,
# and where they do, in words.
Conditions = Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], str]]
_LARGEST = 2**31 - 1  # of whole numbers: steps and token ids are counted in 32 bits


class UserError(ValueError):
    """Something the user can put right, an option or a file; shown as one line."""

    code = 2


class Failed(UserError):
    """What fails in the middle of work: no room on a disk, training that diverges."""

    code = 1


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
    if isinstance(sys.stdout, io.TextIOWrapper):  # text may not fit its encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return run() or 0
    except UserError as error:
        said, code = f"error: {error}", error.code
    except OSError as error:  # of a file or folder that may not be read, say
        place = f"{error.filename}: " if error.filename else ""
        said, code = f"error: {place}{error.strerror or error}", 2
    except Interrupted as stopped:
        said, code = str(stopped), stopped.code
    except KeyboardInterrupt:
        said, code = "interrupted", 130
    print(f"{name}: {' '.join(said.split())}", file=sys.stderr)
    return code


def check(condition: bool, message: str) -> None:
    """`UserError` with a message unless the condition holds."""
    if not condition:
        raise UserError(message)


def option(default: Any, text: str, bounds: str = "", *, bare: Any = None) -> Any:
    """A dataclass field that is also a command-line flag with a help text.

    Args:
      default: the value without the flag.
      text: what `--help` says.
      bounds: an interval such as "[0, 1)"; without a second number it ends at 2^31.
      bare: the value of the flag written without one; None: it must have one.
    """
    metadata = {"help": text, "bounds": bounds, "bare": bare}
    return dataclasses.field(default=default, metadata=metadata)


def flag(name: str) -> str:
    """How the option of a field is written."""
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Options:
    """What sections of options inherit: numbers are checked when they are made."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, bounds = getattr(self, field.name), field.metadata.get("bounds")
            if not bounds or value is None:
                continue
            low, high = (part.strip() for part in bounds[1:-1].split(","))
            high = high or str(_LARGEST if isinstance(value, int) else 1e38)
            above = value > float(low) or (bounds[0] == "[" and value == float(low))
            below = value < float(high) or (bounds[-1] == "]" and value == float(high))
            said = f"{'at least' if bounds[0] == '[' else 'above'} {low} and "
            said += f"{'at most' if bounds[-1] == ']' else 'below'} {high}"
            check(above and below, f"{flag(field.name)} must be {said}, got {value}")


class _Parser(argparse.ArgumentParser):
    """argparse prints a usage text and exits; one line is enough for our users."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _flag_kwargs(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """The keywords of `add_argument` that a field's type asks for."""
    if isinstance(hint, types.UnionType):  # X | None: the flag itself takes an X
        hint = typing.get_args(hint)[0]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", "metavar": "PATH"}
    if typing.get_origin(hint) is not Literal:
        return {"type": hint, "metavar": hint.__name__.upper()}
    bare = field.metadata["bare"]
    may_be_bare = {"nargs": "?", "const": bare} if bare is not None else {}
    return {"choices": typing.get_args(hint)} | may_be_bare


def build(sections: Mapping[str, type], values: Mapping[str, Any]) -> dict[str, Any]:
    """One instance of each section from values by field; what is missing: defaults."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    made = {}
    for name, section in sections.items():
        names = (field.name for field in dataclasses.fields(section))
        made[name] = section(**{key: values[key] for key in names if key in values})
    return made


def parse(
    sections: Mapping[str, type],
    argv: Sequence[str] | None,
    module: str,
    description: str,
    defaults: Mapping[str, Any] | None = None,
    conditions: Conditions | None = None,
) -> dict[str, Any]:
    """One instance of each section; `UserError`, of one line, for a bad option.

    `defaults` by field take the place of the declared ones. Options whose `conditions`
    do not hold must be left at them.
    """
    about = {"prog": f"python -m {module}", "description": description}
    parser = _Parser(**about, allow_abbrev=False)
    for name, section in sections.items():
        group = parser.add_argument_group(name, (section.__doc__ or "").split("\n")[0])
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            default = (defaults or {}).get(field.name, field.default)
            shown = "" if field.default in (None, ()) else f" [{field.default}]"
            text = field.metadata["help"].replace("%", "%%") + shown
            kwargs = _flag_kwargs(field, hints[field.name])
            group.add_argument(flag(field.name), default=default, help=text, **kwargs)
    given = vars(parser.parse_args(argv))
    for name, (acts, where) in (conditions or {}).items():
        unchanged = given[name] == parser.get_default(name)
        check(unchanged or acts(given), f"{flag(name)} acts only {where}")
    return build(sections, given)


def command(
    module: str, section: type, run: Callable[[Any], None], **more: Any
) -> Callable[..., int]:
    """The `main` of a module: runs it with its options, returns the exit code.

    `more` goes to `parse`.
    """
    name, about = module.rpartition(".")[2], run.__doc__ or ""

    def main(argv: Sequence[str] | None = None) -> int:
        def parsed() -> None:
            run(parse({name: section}, argv, module, about, **more)[name])

        return run_command(name, parsed)

    return main
