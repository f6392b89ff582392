"""Small changes of a source, each a fault that tests should notice.

Docstrings, annotations, the texts of errors, names of types and ``__all__`` stay.
"""

import ast
import itertools
import random
import re
from collections import defaultdict
from typing import Any

Row = dict[str, Any]

SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/")},
    **{ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//")},
    **{ast.Pow: ("**", "*"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">=")},
    **{ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")},
    **{ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")},
    **{ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
}
# The text of an error or a warning is no behavior, nor is the size of a cache.
TEXTS = re.compile(r"warnings\.warn|\w*(Error|Warning)|functools\.lru_cache|TypeVar")
BRANCH = re.compile(r"(?<=\|)[\w?*\\.]+\||\|[\w?*\\.]+$")


class Finder(ast.NodeVisitor):
    """Finds the mutations of one source: (operator, start, end, new), in bytes."""

    def __init__(self, source: bytes) -> None:
        self.source, self.found = source, list[tuple[str, int, int, str]]()
        lengths = map(len, source.splitlines(keepends=True))
        self.lines = list(itertools.accumulate(lengths, initial=0))
        self.visit(ast.parse(source))

    def span(self, node: Any) -> tuple[int, int]:
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Any) -> str:
        return self.source[slice(*self.span(node))].decode()

    def put(self, operator: str, node: Any, new: str) -> None:
        self.found.append((operator, *self.span(node), new))

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return
            case ast.Expr(value=ast.Constant(value=str())):  # a docstring
                return
            case ast.Call(func=func) if TEXTS.fullmatch(self.text(func)):
                return
            case ast.Assign(targets=[ast.Name(id=name)]):
                # What a module exports, and names of types.
                if name == "__all__" or re.fullmatch(r"_?[A-Z]+[a-z]\w*", name):
                    return
            case ast.AnnAssign():
                node = node.value or ast.Pass()
            case ast.ClassDef(body=body):
                node = ast.Module(body, [])
            case ast.FunctionDef(args=args):
                # Annotations are for type checkers; decorators say how code is run.
                parts = [*args.defaults, *args.kw_defaults, *node.body]
                node = ast.Module([part for part in parts if part], [])
        getattr(self, f"find_{type(node).__name__}", lambda node: None)(node)
        self.generic_visit(node)

    def swap(self, kind: str, operator: ast.AST, left: Any, right: Any) -> None:
        old, new = SWAPS.get(type(operator), ("", ""))
        start, end = self.span(left)[1], self.span(right)[0]
        place = self.source.find(old.encode(), start, end) if old else -1
        if place >= 0:
            self.found.append((kind, place, place + len(old), new))

    def find_BinOp(self, node: ast.BinOp) -> None:
        self.swap("arithmetic", node.op, node.left, node.right)

    def find_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, node.comparators):
            self.swap("comparison", operator, left, right)
        for operand in operands:
            if isinstance(operand, ast.Constant) and isinstance(operand.value, str):
                self.put("string", operand, repr(operand.value + "_"))

    def find_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in itertools.pairwise(node.values):
            self.swap("boolean", node.op, left, right)

    def find_Constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool(value):
                self.put("constant", node, str(not value))
            case int(value):
                self.put("constant", node, str(value + 1))
            case float(value):
                self.put("constant", node, str(2 * value or 1.0))
            case str(value) if "|" in value:  # a regular expression loses a branch
                for found in BRANCH.finditer(value):
                    rest = value[: found.start()] + value[found.end() :]
                    self.put("branch", node, f'r"{rest}"')

    def find_Subscript(self, node: ast.Subscript) -> None:
        part = node.slice
        for bound in (
            (part.lower, part.upper) if isinstance(part, ast.Slice) else [part]
        ):
            if isinstance(bound, ast.Constant | ast.UnaryOp | ast.Name):
                self.put("index", bound, f"{self.text(bound)} + 1")

    def find_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.put("condition", test, f"not ({self.text(test)})")

    def find_IfExp(self, node: Any) -> None:
        self.put("condition", node.test, f"not ({self.text(node.test)})")

    find_While = find_IfExp

    def find_If(self, node: ast.If) -> None:
        self.find_IfExp(node)
        for statement in node.body:
            self.put("statement", statement, "pass")

    def find_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            start, end = self.span(keyword)
            after = re.compile(rb"\s*,?\s*").match(self.source, end)
            # Where lengths are equal, no test can notice a missing ``strict``.
            if keyword.arg not in (None, "strict") and after:
                self.found.append(("keyword", start, after.end(), ""))
            if keyword.arg == "axis" and isinstance(keyword.value, ast.Constant):
                self.put("index", keyword.value, f"{self.text(keyword.value)} + 1")
        self.exchange("argument", node.args)

    def find_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Tuple):
            self.exchange("returned", node.value.elts)

    def exchange(self, kind: str, nodes: list[Any]) -> None:
        for left, right in itertools.pairwise(nodes):
            (start, middle), (after, end) = self.span(left), self.span(right)
            between = self.source[middle:after].decode()
            new = self.text(right) + between + self.text(left)
            self.found.append((kind, start, end, new))


def draw(source: bytes, count: int, seed: str) -> list[Row]:
    """Draws mutations of different lines: first the operator, then the place."""
    kinds, chosen = defaultdict(list), random.Random(seed)
    for mutation in Finder(source).found:
        kinds[mutation[0]].append(mutation)
    rows: dict[int, Row] = {}
    while any(kinds.values()) and len(rows) < count:
        kind = kinds[chosen.choice(sorted(kind for kind in kinds if kinds[kind]))]
        operator, start, end, new = kind.pop(chosen.randrange(len(kind)))
        mutated = source[:start] + new.encode() + source[end:]
        line = source.count(b"\n", 0, start)
        try:
            same = ast.dump(ast.parse(source)) == ast.dump(ast.parse(mutated))
        except SyntaxError:
            continue
        if not same and line not in rows:
            row = {"line": line + 1, "text": source.splitlines()[line].decode().strip()}
            row |= {"before": source[start:end].decode(), "after": new}
            rows[line] = row | {"operator": operator, "start": start}
    return list(rows.values())
