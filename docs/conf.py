"""The documentation site: ``python -m sphinx -W docs build/docs``."""

import importlib.metadata
import pathlib
import shutil
import sys

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import api_reference  # noqa: E402

import muon2_optax  # noqa: E402

project = "muon2_optax"
author = "The muon2_optax authors"
copyright = "2026, " + author
release = version = muon2_optax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_generated/pages.md", "_generated/result.md"]
html_theme = "furo"
html_title = f"muon2_optax {version}"
# Pages are put together from the README and docstrings: their sources say less.
html_show_sourcelink = False
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Notebooks come with their outputs; tests run them.
nb_execution_mode = "off"

autodoc_member_order = "bysource"
# Docstrings say what arguments are; the aliases of Optax expand to three lines each.
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True


# The pages in their order; one that no section names joins the guide.
SECTIONS = {
    "Start": ["migration", "recipes", "faq"],
    "Guide": [
        *("choosing", "rules", "models", "routing", "methods"),
        *("numerics", "sharding", "training"),
    ],
    "Evidence": ["results", "performance", "conformance"],
    "Reference": ["design", "training_design", "changes", "contributing"],
}
# The notebooks in the order in which to read them; one that is not named comes last.
NOTEBOOKS = [
    *("quickstart", "rules", "small_llama", "why_preconditioning_helps"),
    *("compose_a_variant", "lora", "sharding"),
]


def _source_link() -> dict[str, str]:
    """The repository, where ``pyproject.toml`` names one."""
    try:
        lines = importlib.metadata.metadata("muon2-optax").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    urls = dict(line.split(", ", 1) for line in lines)
    return {"source_repository": urls["Repository"]} if "Repository" in urls else {}


html_theme_options = _source_link()


def _prepare() -> None:
    """Pages made of what stands elsewhere: the notebooks, and every public name."""
    folder = DOCS / "_generated"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "notebooks").mkdir(parents=True)
    for path in _notebooks():
        # Links to pages, which in the repository lie in docs/ and here two folders up.
        page = path.read_text().replace("](../docs/", "](../../")
        (folder / "notebooks" / path.name).write_text(page)
    (folder / "api.md").write_text(api_reference.page())
    (folder / "result.md").write_text(_first_results(DOCS / "results.md"))
    listed = {page for pages in SECTIONS.values() for page in pages}
    others = [p.stem for p in sorted(DOCS.glob("*.md")) if p.stem not in listed]
    notebooks = [f"_generated/notebooks/{p.stem}" for p in _notebooks()]
    listings = [
        _toctree("Start", SECTIONS["Start"]),
        _toctree("Notebooks", notebooks),
        _toctree("Guide", [*SECTIONS["Guide"], *(p for p in others if p != "index")]),
        _toctree("Evidence", SECTIONS["Evidence"]),
        _toctree("Reference", ["_generated/api", *SECTIONS["Reference"]]),
    ]
    (folder / "pages.md").write_text("\n".join(listings))


def _notebooks() -> list[pathlib.Path]:
    """All of them, in the order above."""
    place = {name: i for i, name in enumerate(NOTEBOOKS)}
    found = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return sorted(found, key=lambda path: place.get(path.stem, len(place)))


def _toctree(caption: str, pages: list[str]) -> str:
    """A section of the site, of those pages that exist."""
    lines = [p for p in pages if "/" in p or (DOCS / f"{p}.md").exists()]
    return "\n".join(
        ["```{toctree}", f":caption: {caption}", ":maxdepth: 1", "", *lines, "```", ""]
    )


def _first_results(path: pathlib.Path, count: int = 2) -> str:
    """The first items of the list under a page's heading "In short"."""
    _, found, rest = path.read_text().partition("\n## In short\n")
    items = rest.strip().split("\n\n")[0].split("\n- ")
    if not found or len(items) < count:
        raise ValueError(f"{path}: no {count} results under 'In short'")
    return "\n- ".join(items[:count]) + "\n"


_prepare()


def setup(app):
    app.connect(
        "autodoc-process-docstring", api_reference.escape_docstring, priority=400
    )
