"""`make check` fails where a file or the package became denser than tests/density.toml allows."""

import pytest
import sizes

PLAIN = """
def larger(a, b):
    if a > b:
        return a
    return b
"""
DENSE = """
def larger(a, b):
    return a if a > b else b
"""
BRANCHES = "".join(f"    if a == {number}:\n        return {number}\n" for number in range(10))
COMPLEX = f"def choose(a):\n{BRANCHES}    return a\n"


@pytest.fixture
def check(tmp_path):
    """Return a function that writes a package of these files, measures it, and returns whether it passes."""
    package = tmp_path / "package"
    record = tmp_path / "density.toml"

    def run(*arguments, **files):
        for old in package.glob("*"):
            old.unlink()
        package.mkdir(exist_ok=True)
        for name, text in files.items():
            (package / f"{name}.py").write_text(text)
        return sizes.main(list(arguments), package=package, path=record) == 0

    return run


def test_what_is_counted():
    found = sizes.count(f'"""A docstring\n\nof three lines."""\n# a comment\n{DENSE}')
    assert (found.lines, found.statements, found.conditionals) == (2, 2, 1)
    assert found.nodes_per_statement == sizes.count(DENSE).nodes_per_statement
    assert sizes.count(PLAIN).nodes_per_statement < found.nodes_per_statement


def test_a_file_that_became_denser_fails_until_it_is_allowed(check, capsys):
    assert check("--write", one=PLAIN, other=DENSE)
    assert check(one=PLAIN, other=DENSE)
    assert not check(one=DENSE, other=PLAIN)  # the package is as it was
    assert "ERROR: one.py has" in capsys.readouterr().out
    assert not check("--write", one=DENSE, other=PLAIN)
    assert check("--write", "--allow", one=DENSE, other=PLAIN)
    assert check(one=DENSE, other=PLAIN)


def test_what_went_down_stays_down(check):
    assert check("--write", one=DENSE)
    assert check("--write", one=PLAIN)
    assert not check(one=DENSE)


def test_conditionals_of_the_package_may_not_increase(check, capsys):
    check("--write", one=DENSE, other=PLAIN)
    assert not check(one=DENSE, other=PLAIN, third=DENSE)
    assert "conditionals_per_100_statements" in capsys.readouterr().out


def test_a_new_file_is_no_denser_than_the_package_or_a_file_that_is_gone(check, capsys):
    check("--write", one=DENSE, other=PLAIN)
    assert check(renamed=DENSE, other=PLAIN)
    check("--write", one=PLAIN)
    assert check(one=PLAIN, new=PLAIN)
    capsys.readouterr()
    assert not check(one=PLAIN, new=DENSE)
    assert "ERROR: new.py has" in capsys.readouterr().out


@pytest.mark.parametrize("comment", ["", "# noqa: PLR0911", "# type: ignore"])
def test_a_complex_function_says_why(check, comment):
    said = COMPLEX.replace("return 3", "return 3  # why")
    check("--write", one=said)
    assert check(one=said)
    assert not check(one=COMPLEX.replace("return 3", f"return 3  {comment}"))


def test_long_lines_of_a_statement_count_as_lines(check, capsys):
    assert not check("--write", one=f"x = [{', '.join(str(number) for number in range(20))}]\n")
    assert "nodes per line, more than 9.0" in capsys.readouterr().out
