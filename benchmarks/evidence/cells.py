"""One run of the study, named by everything that its numbers depend on."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

CONTROLS = ("none", "decay", "cautious", "hyperball")


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """A size, an arm, what holds the weights' size, and a seed.

    Attributes:
      size: key of ``sizes.SIZES``.
      arm: key of ``arms.ARMS``.
      control: what keeps the matrices from growing: nothing, decoupled weight decay,
        the same where it agrees with the update (cautious), or a fixed norm
        (hyperball).
      rate: peak learning rate of the matrices.
      decay: strength of the two kinds of weight decay; 0 with the other controls.
      seed: of the initial weights and of the order of the data.
      steps: length of the run, whose schedule ends with it; 0: the size's.
      adam_rate: peak learning rate of all that is no matrix; 0: the size's.
    """

    size: str
    arm: str
    control: str
    rate: float
    decay: float = 0.0
    seed: int = 101
    steps: int = 0
    adam_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.control not in CONTROLS:
            raise ValueError(f"unknown control {self.control!r}; known: {CONTROLS}")
        if (self.decay > 0) != (self.control in ("decay", "cautious")):
            raise ValueError(f"decay {self.decay} does not go with {self.control!r}")

    def with_seed(self, seed: int) -> "Cell":
        return dataclasses.replace(self, seed=seed)

    @property
    def treatment(self) -> str:
        """The control and its strength in a word: how arms are grouped."""
        return f"{self.control} {self.decay:g}" if self.decay else self.control


FIELDS = tuple(field.name for field in dataclasses.fields(Cell))


def of_line(line: Mapping[str, Any]) -> Cell:
    """The cell that a line of results belongs to."""
    return Cell(**{name: line[name] for name in FIELDS if name in line})


def read(lines: Iterable[str]) -> dict[Cell, dict[str, Any]]:
    """Results by cell; the last line of a cell counts."""
    rows = [json.loads(line) for line in lines if line.strip()]
    return {of_line(row): row for row in rows}


def perplexity_order(results: Mapping[Cell, Mapping[str, Any]], cell: Cell) -> float:
    """The final loss, for sorting: a run that diverged is worst."""
    loss = results[cell]["loss"]
    return float("inf") if loss is None else float(loss)
