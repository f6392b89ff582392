"""Pages and docstrings say what is true: their code runs, their names exist."""

import ast
import doctest
import functools
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import muon2_optax as m2

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "muon2_optax"

# Pages whose Python blocks run, one after the other, in one namespace.
PAGES = ["README.md", "docs/faq.md", "docs/numerics.md", "docs/sharding.md"]


def modules_with_examples():
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
        documented = (n for n in ast.walk(tree) if isinstance(n, nodes))
        if any(">>> " in (ast.get_docstring(n) or "") for n in documented):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert tried and not failed


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M)


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs(page, capsys):
    blocks, names = python_blocks(ROOT / page), {}
    assert blocks
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_skeleton_of_a_transform(size):
    (block,) = python_blocks(ROOT / "CONTRIBUTING.md")
    names = {}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    rng = np.random.default_rng(0)
    g = rng.standard_normal((2, 5, 7)) * np.arange(5.0)[:, None]
    rules = m2.MatrixRules((("w", m2.MatrixAxes(-2, -1)),))
    tx = names["equalize_inputs"](rules=rules)
    tree = {"w": jnp.asarray(g * size, jnp.float32)}
    updates, _ = tx.update(tree, tx.init(tree))
    root = np.sqrt(np.mean(g**2, axis=-1, keepdims=True))
    want = np.divide(g, root, out=np.zeros_like(g), where=root > 0)
    # A few roundings of float32, of 6e-8 each.
    np.testing.assert_allclose(updates["w"], want, rtol=1e-6)


def test_first_example_has_ten_lines():
    text = (ROOT / "README.md").read_text()
    shown = text.split("<!-- example -->")[1].split("<!-- end of example -->")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```", shown, re.DOTALL | re.M)
    assert len(block.splitlines()) == 10


def test_ci_finds_the_readmes_line():
    """``.ci/run`` takes from the README what it runs; nothing else would notice."""
    script = (ROOT / ".ci/run").read_text()
    (command,) = re.findall(r"^test_line=\$\((.*) README\.md\)$", script, re.M)
    found = subprocess.run(
        f"{command} README.md", shell=True, cwd=ROOT, capture_output=True, text=True
    )
    install, test = found.stdout.strip().split(" && ")
    assert install == 'pip install -e ".[test]"'
    assert test == 'python -m pytest -m "not slow" -n auto'


@pytest.mark.parametrize("page", sorted(p.name for p in ROOT.glob("docs/*.md")))
def test_links_between_pages(page):
    """Relative links lead to files that are there, and to headings that are there."""
    text = (ROOT / "docs" / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", text):
        assert (ROOT / "docs" / target).exists(), target
    for target in re.findall(r"\]\(#([^)]+)\)", text):
        heads = [h.strip().lower() for h in re.findall(r"^#+ (.*)$", text, re.M)]
        slugs = {re.sub(r"[^\w -]", "", h).replace(" ", "-") for h in heads}
        assert target in slugs, target


def test_links_of_the_readme():
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {m2.__version__}\n" in citation
    assert f"\n## {m2.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_public_name_is_on_the_reference_page():
    code = "import api_reference; print(api_reference.page())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'docs'}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    shown = set(re.findall(r"\.\. auto\w+:: (\S+)", result.stdout))
    public = {f"muon2_optax.{n}" for n, v in vars(m2).items() if callable(v)}
    assert {n for n in public if not n.split(".")[-1].startswith("_")} <= shown
    assert "muon2_optax.diagnostics.orthogonalization_report" in shown
    assert "## Optimizers" in result.stdout and "## Transforms" in result.stdout
    assert {"muon2_optax.ready_rules.maxtext", "muon2_optax.ready_rules.levanter"} <= (
        shown
    )
    data = re.findall(r"py:data:: (\S+)\n\n +(\S+)", result.stdout)
    assert {name for name, _ in data} == {
        *("muon2_optax.REGISTRY", "muon2_optax.SCHEDULES"),
        *("muon2_optax.ready_rules.MAXTEXT", "muon2_optax.ready_rules.LEVANTER"),
    }


def test_docstrings_refer_to_public_names_only():
    """What stands in double backquotes with a dot is found by who reads the page."""
    inside = (
        r"``(?:muon2_optax\.)?(plans|routing|models|kernels|axes|LeafRule)\b[^`]*``"
    )
    diagnostics = [n for n in dir(m2.diagnostics) if not n.startswith("_")]
    for name in (*m2.__all__, *(f"diagnostics.{n}" for n in diagnostics)):
        value = functools.reduce(getattr, name.split("."), m2)
        methods = vars(value).values() if inspect.isclass(value) else ()
        for each in (value, *methods):
            doc = inspect.getdoc(each) or ""
            assert not re.search(inside, doc), f"{name}: {re.search(inside, doc)}"


def test_help_of_the_dictionaries():
    assert "optimizers by name" in type(m2.REGISTRY).__doc__
    assert "coefficient schedules" in type(m2.SCHEDULES).__doc__
    with pytest.raises(TypeError):
        m2.REGISTRY["muon3"] = m2.muon
