"""Notebooks run from top to bottom in a fresh kernel, and ship what they printed."""

import ast
import base64
import importlib
import importlib.util
import pathlib
import re

import nbclient
import nbformat
import pytest

import muon2_optax as m2

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
of_each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def code_cells(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def outputs_of(path):
    return [output for cell in code_cells(path) for output in cell.outputs]


@pytest.mark.slow
@of_each_notebook
def test_notebook_runs(path, monkeypatch):
    """With the library of this checkout, which the first cell then need not install."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": path.parent}}
    ).execute()


@of_each_notebook
def test_notebook_is_valid(path):
    """The ids that nbformat asks for are there, and stay when a cell is run again."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    ids = [cell["id"] for cell in notebook.cells]
    assert ids == [f"cell-{i:02d}" for i in range(len(ids))]


@of_each_notebook
def test_notebook_ships_its_outputs(path):
    """Readers see results without running anything; no run left an error behind."""
    outputs = outputs_of(path)
    assert any(output.output_type == "stream" for output in outputs)
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert [c.execution_count for c in code_cells(path)] == list(
        range(1, len(code_cells(path)) + 1)
    )
    assert path.stat().st_size < 200_000


@of_each_notebook
def test_outputs_are_quiet(path):
    """No warnings or progress bars, and nothing of the machine that it ran on."""
    for output in outputs_of(path):
        if output.output_type == "stream":
            assert output.name == "stdout"
            assert not re.search(r"Warning|\r|\x1b|(^|\s|')/\w+/\w+", output.text)


@of_each_notebook
def test_figures_are_small(path):
    images = [o.data["image/png"] for o in outputs_of(path) if "data" in o]
    sizes = [len(base64.b64decode(image)) for image in images]
    assert all(size < 40_000 for size in sizes), sizes


@of_each_notebook
def test_only_public_names_are_used(path):
    """Every ``m2.name`` is one that the library lists as its interface."""
    public = {"m2": {*m2.__all__, "__version__"}}
    for module in ("diagnostics", "ready_rules"):
        names = vars(getattr(m2, module))
        public[f"m2.{module}"] = {name for name in names if not name.startswith("_")}
    used = set()
    for cell in code_cells(path):
        source = re.sub(r"^(\s*)%.*", r"\1pass", cell.source, flags=re.M)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute):
                used.add((ast.unparse(node.value), node.attr))
            assert not isinstance(node, ast.ImportFrom) or "muon2" not in node.module
    used = {(owner, name) for owner, name in used if owner in public}
    assert used and all(name in public[owner] for owner, name in used), used


@of_each_notebook
def test_links_lead_to_files(path):
    """In the repository; the site rewrites those to ``docs`` (``docs/conf.py``)."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
@of_each_notebook
def test_notebook_is_listed(path, page):
    assert f"notebooks/{path.name})" in (ROOT / page).read_text()


def test_first_cell_is_the_same_in_all():
    assert len({code_cells(path)[0].source for path in NOTEBOOKS}) == 1


INSTALLED = {"muon2_optax", "flax", "matplotlib"}


def run_install_cell(monkeypatch, before, after=INSTALLED):
    """What the cell asks pip for, where the modules ``before`` are there already."""
    asked, there = [], set(before)

    def install(arguments):
        asked.append(arguments)
        there.update(after)

    find_spec = lambda name: object() if name in there else None  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    cell = re.sub(
        r"%pip install -q (.*)", r"install(f'\1')", code_cells(NOTEBOOKS[0])[0].source
    )
    exec(cell, {"install": install})
    return asked


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "clone" / "notebooks"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


REST = '"flax>=0.12" "matplotlib>=3.9"'


def test_first_cell_does_nothing_where_all_is_there(folder, monkeypatch):
    assert run_install_cell(monkeypatch, INSTALLED) == []


@pytest.mark.parametrize("missing", sorted(INSTALLED))
def test_first_cell_installs_what_is_missing(folder, monkeypatch, missing):
    asked = run_install_cell(monkeypatch, INSTALLED - {missing})
    assert asked == [f'"muon2-optax" {REST}']


def test_first_cell_prefers_the_clone_then_the_wheel(folder, monkeypatch):
    wheel = folder / "muon2_optax-0.2.0-py3-none-any.whl"
    wheel.touch()
    assert run_install_cell(monkeypatch, ()) == [f'"{wheel}" {REST}']
    clone = folder.parent
    (clone / "muon2_optax").mkdir()
    assert run_install_cell(monkeypatch, ()) == [f'"{clone}" {REST}']


def test_first_cell_says_what_to_do_where_the_index_has_nothing(folder, monkeypatch):
    with pytest.raises(ImportError, match="wheel beside this notebook"):
        run_install_cell(monkeypatch, (), after={"flax", "matplotlib"})


def test_first_cell_asks_for_what_the_extras_ask_for():
    """The versions in the cell are those that pyproject.toml asks for."""
    listed = (ROOT / "pyproject.toml").read_text()
    assert all(f"{requirement}," in listed for requirement in REST.split())
