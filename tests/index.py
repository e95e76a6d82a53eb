"""Writes tests/README.md: what each test file tests, and which test files run a module of the package.

What a file tests is the first line of its docstring. Which files run a module was recorded in one run of `make test`,
in which each function of the package noted that it was called; `tests/index.toml` holds the result: for each module
the test files that together call most of its functions, the best one first.

    python tests/index.py            # writes the page from docstrings and the recorded calls
    python tests/index.py --collect  # runs the tests of `make test` first, and records the calls
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent
PACKAGE = REPOSITORY / "hfscale"
PAGE = TESTS / "README.md"
CALLS = TESTS / "index.toml"
MARKERS = "not (gpu or faults or timing or long or trainers or finetuning or recipes)"
MOST_FILES = 3
"""Test files that are named for a module."""
LONG_SUITES = {
    "faults": "make test-faults",
    "finetuning": "make test-finetuning",
    "mutations": "make test-mutations",
    "trainers": "make test-trainers",
    "versions": "make test-versions",
}
INTRODUCTION = """# Tests

Written by `python tests/index.py`. [CONTRIBUTING.md](../CONTRIBUTING.md#which-tests-a-change-needs) says which tests a
change needs. Folders are those of the package; files that do not begin with `test_` are helpers, and `workers/` holds
the scripts that tests launch.
"""
OF_MODULES = """
## Which tests run a module

The test files that call most of a module's functions, the best first, in one run of `make test`. A module without a
file is run by the long suites only.
"""


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring; empty if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").strip()


def test_files() -> list[Path]:
    """Return the test files, in the order of the page."""
    return sorted(TESTS.rglob("test_*.py"), key=lambda path: (path.parent != TESTS, path))


def page(calls: dict[str, list[str]]) -> str:
    """Return the text of the page.

    Args:
        calls (`dict[str, list[str]]`): the test files of each module, both as paths.
    """
    parts = [INTRODUCTION]
    folder = None
    for path in test_files():
        if path.parent != folder:
            folder = path.parent
            parts.append(_heading(folder.relative_to(TESTS).as_posix()))
        parts.append(f"| `{path.name}` | {first_line(path)} |\n")
    if calls:
        parts.append(OF_MODULES)
    packages = defaultdict(list)
    for module in sorted(calls):
        packages[module.rpartition("/")[0]].append(module)
    for package, modules in packages.items():
        title = f"hfscale/{package}".rstrip("/")
        parts.append(f"\n### {title}\n\n| module | test files |\n|---|---|\n")
        for module in modules:
            files = ", ".join(f"`{file}`" for file in calls[module])
            parts.append(f"| `{module.rpartition('/')[2]}` | {files} |\n")
    return "".join(parts)


def _heading(folder: str) -> str:
    title = "All of it" if folder == "." else f"`{folder}/`"
    suite = LONG_SUITES.get(folder)
    note = f"Run by `{suite}`, apart from what is quick.\n\n" if suite else ""
    return f"\n## {title}\n\n{note}| file | tests |\n|---|---|\n"


def recorded() -> dict[str, list[str]]:
    """Return the test files of each module, without those that are gone; nothing before the first run."""
    if not CALLS.is_file():
        return {}
    calls = tomllib.loads(CALLS.read_text(encoding="utf-8"))["calls"]
    files = {path.relative_to(TESTS).as_posix() for path in test_files()}
    return {
        module: [file for file in of_module if file in files]
        for module, of_module in calls.items()
        if (PACKAGE / module).is_file()
    }


# --- recording -------------------------------------------------------------------------------------------------------

HOOK = '''
"""Imported by every Python process of the run: each function of hfscale notes that it was called, once."""

import ast, importlib.machinery, importlib.util, os, sys

PACKAGE = os.environ["HFSCALE_INDEX_PACKAGE"]
OUTPUT = os.environ["HFSCALE_INDEX_OUTPUT"]
seen = set()
opened = {}


def called(name):
    key = (os.environ.get("HFSCALE_INDEX_FILE", ""), name)
    if key in seen:
        return
    seen.add(key)
    pid = os.getpid()
    if pid not in opened:
        opened.clear()
        opened[pid] = os.open(f"{OUTPUT}/{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(opened[pid], f"{key[0]}\\t{name}\\n".encode())
    except OSError:  # a test has closed it
        opened.clear()
        seen.discard(key)


class Marker(ast.NodeTransformer):
    def __init__(self, module):
        self.module = module

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        name = f"{self.module}:{node.lineno}"
        call = ast.parse(f"__hfscale_called__({name!r})").body[0]
        has_docstring = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        place = 1 if has_docstring else 0
        for part in ast.walk(call):
            ast.copy_location(part, node.body[0])
        node.body.insert(place, call)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        module = os.path.relpath(path, PACKAGE)
        tree = Marker(module).visit(ast.parse(self.get_data(path)))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "hfscale" and not name.startswith("hfscale."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin and spec.origin.startswith(PACKAGE + os.sep):
            spec.loader = Loader(name, spec.origin)
        return spec


import builtins

builtins.__hfscale_called__ = called
sys.meta_path.insert(0, Finder())
'''


def pytest_runtest_setup(item: object) -> None:
    """Note which test file runs, in a variable that processes inherit. pytest calls it: this module is a plugin."""
    os.environ["HFSCALE_INDEX_FILE"] = item.path.relative_to(TESTS).as_posix()  # type: ignore[attr-defined]


def collect(arguments: Iterable[str]) -> dict[str, list[str]]:
    """Run the tests and return the test files that call most of each module's functions."""
    with tempfile.TemporaryDirectory() as folder:
        hook, output = Path(folder, "hook"), Path(folder, "calls")
        hook.mkdir()
        output.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        layers = [str(hook), str(TESTS), str(REPOSITORY)]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(layers),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HFSCALE_INDEX_PACKAGE": str(PACKAGE),
            "HFSCALE_INDEX_OUTPUT": str(output),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "index", "-m", MARKERS]
        command += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *arguments]
        subprocess.run(command, cwd=REPOSITORY, env=env, check=False)
        return chosen(line for path in output.iterdir() for line in path.read_text().splitlines())


def chosen(lines: Iterable[str], package: Path = PACKAGE) -> dict[str, list[str]]:
    """Return at most `MOST_FILES` test files for each module, of those that call its functions.

    The first is the one that calls most of them; each further one calls most of those that are left. Of several that
    call as many the one comes first that calls fewest functions of the whole package, and so is about this module.

    Args:
        lines (`Iterable[str]`): test file and function (`module:line`), separated by a tab.
        package (`Path`): the package, of which every module with a function gets an entry.
    """
    functions: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    of_file: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        file, _, function = line.partition("\t")
        if file:
            functions[function.partition(":")[0]][file].add(function)
            of_file[file].add(function)
    modules = [path for path in sorted(package.rglob("*.py")) if _has_functions(path)]
    found: dict[str, list[str]] = {path.relative_to(package).as_posix(): [] for path in modules}
    for module in found:
        files = functions[module]
        left = set().union(*files.values())
        while left and len(found[module]) < MOST_FILES:
            best = max(sorted(files), key=lambda file: (len(files[file] & left), -len(of_file[file])))
            found[module].append(best)
            left -= files[best]
    return found


def _has_functions(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree))


def main() -> None:
    """Write the page; with `--collect` record the calls first."""
    parser = argparse.ArgumentParser(description="Writes tests/README.md.")
    parser.add_argument("--collect", action="store_true", help="run the tests and record what they call")
    parser.add_argument("arguments", nargs="*", help="with --collect: the tests to run, by default all of make test")
    options = parser.parse_args()
    if options.collect:
        calls = collect(options.arguments)
        rows = (f'"{module}" = {files}\n'.replace("'", '"') for module, files in calls.items())
        text = (
            "# Written by `python tests/index.py --collect`: a module, and the test files that call its functions.\n\n"
        )
        CALLS.write_text(f"{text}[calls]\n{''.join(rows)}", encoding="utf-8")
    PAGE.write_text(page(recorded()), encoding="utf-8")


if __name__ == "__main__":
    main()
