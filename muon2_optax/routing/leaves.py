"""What is known of one leaf: a rule for it, where it goes, a doubt about that."""

import dataclasses

from muon2_optax.axes import MatrixAxes, ResolvedAxes

MATRIX, ADAM = "matrix", "adam"
Shape = tuple[int, ...]
UNCOVERED = "NO RULE (rank 3 or more)"
GUESSED = "neither its module nor its name says what it is"
LEFT_OUT = "the tree of dimension numbers leaves it out"


@dataclasses.dataclass(frozen=True)
class LeafRule:
    """What one leaf is, known from its model or its neighbours rather than its name.

    Attributes:
      path: the leaf's path, ``"layers/0/kernel"``.
      axes: the axes that form its matrices, or None for AdamW.
      reason: a short phrase for ``MatrixRules.describe``: ``"module Linear"``.
      doubt: what speaks against it, for a warning; empty where nothing does.
      guessed: whether only its shape decides, since its model and name say nothing.
    """

    path: str
    axes: MatrixAxes | None
    reason: str
    doubt: str = ""
    guessed: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """A doubtful leaf, and the axes that it has until a rule settles it."""

    path: str
    shape: Shape
    group: str
    doubt: str
    axes: ResolvedAxes | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Where one leaf goes.

    Attributes:
      path: the leaf's path.
      shape: its shape.
      axes: the axes of its matrices; None for AdamW.
      reason: a short phrase: ``"name: head"``.
      doubt: what speaks against it; empty where nothing does.
      guessed: as in ``LeafRule``.
    """

    path: str
    shape: Shape
    axes: ResolvedAxes | None
    reason: str
    doubt: str = ""
    guessed: bool = False

    @property
    def group(self) -> str:
        return ADAM if self.axes is None else MATRIX

    @property
    def uncovered(self) -> bool:
        """Whether AdamW gets it only because no rule covers its rank."""
        return self.reason == UNCOVERED

    @property
    def doubtful(self) -> bool:
        """Whether the user should say what it is."""
        return bool(self.doubt) or self.uncovered or self.guessed

    @property
    def by_name(self) -> bool:
        """Whether its name says that AdamW trains it."""
        return self.reason.startswith("name: ")

    @property
    def case(self) -> Case:
        """The leaf as one to ask the user about."""
        unsettled = GUESSED if self.guessed else "no rule covers it"
        doubt = self.doubt or unsettled
        return Case(self.path, self.shape, self.group, doubt, self.axes)
