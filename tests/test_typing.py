"""The installed package tells mypy, pyright and pyrefly its types (PEP 561)."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = ROOT / "tests/typing/user_program.py"

# Lines that a checker has to refuse, and what it says of each.
WRONG = """
import muon2_optax as m2
m2.muon2()
m2.muon2(0.02, no_such_argument=1)
m2.MatrixRules(strict="yes")
m2.no_such_name
m2.muon2(0.02, shape_scale="match-rms")
m2.scale_by_shape("kellr")
m2.muon(0.02, ns_coeffs="kellr")
m2.muon(0.02, (3.4, -4.8, 2.0))
m2.muon(None)
m2.muon_eq(0.02, form="root")
m2.muon_h(0.02, radius="initial")
m2.muon_bp(0.02, beta=0.9)
m2.normuon(0.02, rest=0.1)
"""
# Optax 0.2.8 tells checkers no types: to mypy, its schedules and transformations are
# Any, and so are learning_rate and rest.
UNTYPED_LINES = {"mypy": [11, 15], "pyright": [], "pyrefly": []}
WRONG_LINES = range(3, 16)
CHECKERS = ["mypy", "pyright", "pyrefly"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A Python with a copy of the package and everything else that is here.

    The source tree itself will not do: checkers read its annotations with or without
    ``py.typed``.
    """
    folder = tmp_path_factory.mktemp("installed")
    made = [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")]
    subprocess.run(made, check=True, timeout=120)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    shutil.copytree(ROOT / "muon2_optax", folder / "copy" / "muon2_optax")
    (site / "here.pth").write_text(
        f"{folder / 'copy'}\n{sysconfig.get_path('purelib')}\n"
    )
    return folder


def checked(checker, folder, program, timeout=600):
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    python = str(folder / "venv/bin/python")
    if checker == "mypy":
        options = ["--strict", "--python-executable", python, "--no-pretty"]
        options += ["--cache-dir", str(folder / "cache")]
    elif checker == "pyrefly":
        options = ["check", "--python-interpreter-path", python]
        # As in a project that has a configuration; without one, little is checked.
        options += ["--preset", "default", "--output-format", "min-text"]
    else:
        options = ["--pythonpath", python]
    return subprocess.run(
        [sys.executable, "-m", checker, *options, str(program)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_program(checker, installed):
    program = installed / "user_program.py"
    shutil.copy(PROGRAM, program)
    result = checked(checker, installed, program)
    if checker == "pyright" and "node" in result.stderr and result.returncode > 1:
        pytest.skip("pyright finds no Node.js")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_wrong_lines_are_refused(checker, installed):
    """So the annotations are read, and are not all ``Any``."""
    program = installed / "wrong.py"
    program.write_text(WRONG)
    result = checked(checker, installed, program)
    if checker == "pyright" and "node" in result.stderr and result.returncode > 1:
        pytest.skip("pyright finds no Node.js")
    for line in set(WRONG_LINES) - set(UNTYPED_LINES[checker]):
        assert f"wrong.py:{line}:" in result.stdout, result.stdout + result.stderr


def test_the_program_runs():
    result = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("muon2_optax ")
