"""Whether the tests notice faults: changes of the library's code, one at a time.

``python -m benchmarks.mutations`` draws some for each module of ``muon2_optax``
(``benchmarks/mutants.py`` says which), and runs the tests that execute the changed
line, the fastest first, in a copy of a commit. Which these are is measured once for a
commit, with ``pytest-cov``. Each change leaves a JSON line: the test that failed, or
"survived". ``--again --tests -m slow`` tries the survivors with other tests,
``--together`` all at once: one run, where they survive again.
"""

import argparse
import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from xml.etree import ElementTree

from benchmarks.mutants import Row, draw

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutations.jsonl"
CACHE = pathlib.Path(tempfile.gettempdir()) / "muon2-mutations"


def tree_of(commit: str) -> pathlib.Path:
    """The files of a commit, with what Python and pytest compiled of them."""
    tree = CACHE / f"tree-{commit}"
    if not tree.exists():
        archive = ["git", "archive", "--format=tar", commit]
        files = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True)
        tree.mkdir(parents=True)
        subprocess.run(["tar", "x"], cwd=tree, input=files.stdout, check=True)
    return tree


def run(tree: pathlib.Path, arguments: list[str], limit: float) -> tuple[str, float]:
    """Runs pytest; returns what failed, or "", and the seconds."""
    # Programs that a change does not touch are compiled once for all copies.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(CACHE / "programs")}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.03"
    (tree / "arguments").write_text("\n".join(arguments))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    begin = time.monotonic()
    with subprocess.Popen(
        [*command, "@arguments"],
        cwd=tree,
        env=os.environ | cache,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # the workers of pytest end with it
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.M)
            what = failed[1] if failed else output.strip().splitlines()[-1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            what = f"no end after {limit:.0f} s"
    failed_at_all = process.returncode != 0
    return what if failed_at_all else "", round(time.monotonic() - begin, 1)


def choose_tests(commit: str) -> Callable[[Row, float], list[str]]:
    """Measures which tests execute which line; returns what chooses by that."""
    from coverage import CoverageData

    tree = tree_of(commit)
    if not (tree / "times.xml").exists():
        measure = ["--cov=muon2_optax", "--cov-context=test", "--cov-report="]
        run(tree, [*measure, "--junitxml=times.xml", "-n2", "-mnot slow"], 3600)
    data, seconds = CoverageData(str(tree / ".coverage")), {}
    data.read()
    for case in ElementTree.parse(tree / "times.xml").iter("testcase"):
        file = case.attrib["classname"].replace(".", "/")
        passed = case.find("failure") is None and case.find("skipped") is None
        spent = float(case.attrib["time"]) if passed else math.inf
        seconds[f"{file}.py::{case.attrib['name']}"] = spent

    def choose(row: Row, limit: float) -> list[str]:
        """Tests of up to ``limit`` seconds; of all functions one, then another."""
        files = [f for f in data.measured_files() if f.endswith("/" + row["module"])]
        by_line = data.contexts_by_lineno(*files) if files else {}
        ran = [
            {c.rpartition("|")[0] for n in lines for c in by_line.get(n, [])} - {""}
            for lines in ([row["line"]], by_line)
        ]
        # No test runs the lines of a table: they run when the module is imported. For
        # such lines, all tests that run any line of the module are chosen.
        names = sorted(ran[0] or ran[1] or seconds, key=lambda n: seconds.get(n, 1.0))
        words = re.findall("[a-z0-9]{3,}", row["module"].partition("/")[2][:-3])
        turns, ranked = defaultdict(int), []
        for name in names:
            function = name.partition("[")[0]
            turns[function] += 1
            others = not any(word in function for word in words)
            spent = seconds.get(name, 1.0)
            ranked.append(
                (others and turns[function] > 1, turns[function], spent, name)
            )
        ranked.sort()
        totals = itertools.accumulate(spent for *_, spent, _ in ranked)
        return [name for (*_, name), total in zip(ranked, totals) if total < limit]

    return choose


def judge(rows: list[Row], tests: list[str], limit: float) -> Row:
    """Makes mutations of one commit in a copy of it, and runs tests there."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        tree = pathlib.Path(folder) / "tree"
        shutil.copytree(tree_of(rows[0]["commit"]), tree, symlinks=True)
        for row in sorted(rows, key=lambda row: -row["start"]):
            source = (tree / row["module"]).read_bytes()
            end = row["start"] + len(row["before"].encode())
            if source[row["start"] : end].decode() != row["before"]:
                raise ValueError(f"{row['module']} has changed: draw new mutations")
            source = source[: row["start"]] + row["after"].encode() + source[end:]
            (tree / row["module"]).write_bytes(source)
        failed, seconds = run(tree, ["-x", *tests], limit)
    return {"killed_by": failed or "survived", "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--modules", nargs="*", default=[""], help="parts of paths")
    parser.add_argument("--each", type=int, default=2, help="mutations of a module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60, help="seconds of tests")
    parser.add_argument("--again", action="store_true", help="those that survived")
    parser.add_argument("--together", action="store_true", help="all at once")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="pytest's arguments")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    CACHE.mkdir(exist_ok=True)
    short = ["git", "rev-parse", "--short", args.commit]
    commit = subprocess.check_output(short, cwd=ROOT, text=True).strip()
    if args.again:
        rows = [json.loads(line) for line in args.out.read_text().splitlines()]
        rows = [
            row | {"commit": commit} for row in rows if "survived" in row["killed_by"]
        ]
    else:
        tree = tree_of(commit)
        paths = sorted(tree.glob("muon2_optax/**/*.py"))
        modules = {str(path.relative_to(tree)): path.read_bytes() for path in paths}
        rows = [
            {"benchmark": "mutations", "module": module, **row, "commit": commit}
            for module, source in modules.items()
            for row in draw(source, args.each, f"{args.seed} {module}")
        ]
    rows = [row for row in rows if any(part in row["module"] for part in args.modules)]
    if args.together:
        print(judge(rows, args.tests or ["-n2"], 3600))
        return
    choose = None if args.tests else choose_tests(commit)

    def judged(row: Row) -> Row:
        tests, suite = args.tests, " ".join(args.tests or [])
        if choose:
            tests = choose(row, args.limit)
            suite = f"default, {len(tests)} tests"
        if not tests:
            return row | {"killed_by": "survived", "suite": "nothing executes it"}
        result = judge([row], tests, 60 + 3 * args.limit)
        return row | result | {"suite": suite}

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(judged, rows):
            print(f"{row['module']}:{row['line']} {row['killed_by']}", flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
