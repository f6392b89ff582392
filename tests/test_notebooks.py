"""Every notebook runs from top to bottom in a fresh kernel."""

import importlib.util
import pathlib
import re

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": path.parent}}
    ).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_ships_its_outputs(path):
    """Readers see results without running anything; no run left an error behind."""
    notebook = nbformat.read(path, as_version=4)
    outputs = [o for c in notebook.cells for o in c.get("outputs", [])]
    assert any(o.output_type == "stream" for o in outputs)
    assert not any(o.output_type == "error" for o in outputs)
    assert path.stat().st_size < 500_000


def install_cell(path):
    cells = nbformat.read(path, as_version=4).cells
    return next(c.source for c in cells if c.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_first_cell_installs_from_what_is_there(path, tmp_path, monkeypatch):
    """A clone, else a wheel, else the index; nothing where the library is installed."""
    asked = []
    cell = re.sub(r"%pip install -q (.*)", r"asked.append(f\1)", install_cell(path))
    folder = tmp_path / "clone" / "notebooks"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    exec(cell, {"asked": asked})
    assert not asked
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(cell, {"asked": asked})
    wheel = folder / "muon2_optax-0.2.0-py3-none-any.whl"
    wheel.touch()
    exec(cell, {"asked": asked})
    (tmp_path / "clone" / "muon2_optax").mkdir()
    exec(cell, {"asked": asked})
    sources = ["muon2-optax", str(wheel), str(tmp_path / "clone")]
    assert asked == [f"{source}[examples]" for source in sources]
