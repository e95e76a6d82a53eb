"""tests/README.md lists every test file with what it tests; its script finds the files that run a module."""

import subprocess
import sys

import index
import pytest


@pytest.mark.parametrize("path", index.test_files(), ids=lambda path: path.relative_to(index.TESTS).as_posix())
def test_a_test_file_says_what_it_tests(path):
    assert index.first_line(path).endswith((".", "`"))


def test_the_page_lists_every_test_file():
    """Run `python tests/index.py` after a change of a docstring, or a new file."""
    page = index.PAGE.read_text(encoding="utf-8")
    rows = {f"| `{path.name}` | {index.first_line(path)} |" for path in index.test_files()}
    assert [row for row in sorted(rows) if row not in page] == []


@pytest.mark.skipif(not index.CALLS.is_file(), reason="not recorded yet: python tests/index.py --collect")
def test_most_modules_have_a_test_file():
    calls = index.recorded()
    assert set().union(*calls.values()) <= {path.relative_to(index.TESTS).as_posix() for path in index.test_files()}
    assert sum(bool(files) for files in calls.values()) > 0.9 * len(calls)


@pytest.fixture
def package(tmp_path):
    """A package of two modules, of which one has three functions."""
    folder = tmp_path / "hfscale"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "one.py").write_text("def a():\n    'Says a.'\n    b()\n\ndef b():\n    return 1\n\ndef c(): pass\n")
    (folder / "two.py").write_text("async def d():\n    pass\n")
    return folder


def test_the_best_files_of_a_module_are_those_that_together_call_most(package):
    called = {
        "whole/test_broad.py": ["one.py:1", "one.py:5", "two.py:1"],
        "core/test_one.py": ["one.py:1", "one.py:5"],
        "core/test_more.py": ["one.py:8"],
        "core/test_less.py": ["one.py:1"],
    }
    lines = (f"{file}\t{function}" for file, functions in called.items() for function in functions)
    assert index.chosen(lines, package) == {
        "one.py": ["core/test_one.py", "core/test_more.py"],
        "two.py": ["whole/test_broad.py"],
    }


def test_each_function_that_runs_is_noted_once(package, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(index.HOOK)
    output = tmp_path / "calls"
    output.mkdir()
    env = {
        "PYTHONPATH": str(tmp_path),
        "HFSCALE_INDEX_PACKAGE": str(package),
        "HFSCALE_INDEX_OUTPUT": str(output),
        "HFSCALE_INDEX_FILE": "test_one.py",
    }
    program = "from hfscale import one; one.a(); one.b(); print(one.a.__doc__)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    (noted,) = output.iterdir()
    assert noted.read_text() == "test_one.py\tone.py:1\ntest_one.py\tone.py:5\n"
    assert done.stdout == "Says a.\n"
