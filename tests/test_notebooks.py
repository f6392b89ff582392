"""Every notebook runs from top to bottom in a fresh kernel."""

import pathlib

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
