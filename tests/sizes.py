"""Measures how long and how dense the package's files are; fails where a file or the package became denser.

A module is as long as its idea, and a function fits on a screen or two: a long one is a reason to look, so it is a
warning. A line says one thing: what is packed into statements can only go down, so these figures, which
`tests/density.toml` records, fail when they go up.

| figure | of | what it counts |
|---|---|---|
| nodes per statement | each file, the package | nodes of the syntax tree, whatever the layout |
| conditionals per 100 statements | the package | `a if b else c`: a plain `if` or a named function says it better |
| complex without a comment | the package | functions above a McCabe complexity of 10 without a comment that says why |
| nodes per line | the package | nodes of the syntax tree per line of code, at most 9.0 |

A file that is not recorded may be as dense as the package; or, since it may have been renamed, as the densest recorded
file that is gone.

    python tests/sizes.py            # what `make check` runs
    python tests/sizes.py --write    # records the figures that went down, and new files
    python tests/sizes.py --write --allow    # records all figures, also those that went up
"""

import argparse
import ast
import io
import math
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "hfscale"
RECORD = Path(__file__).resolve().parent / "density.toml"
MAX_LINES_OF_FILE = 600
MAX_LINES_OF_FUNCTION = 80
MAX_COMPLEXITY = 10
MAX_NODES_PER_LINE = 9.0

BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
NO_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT)
PRAGMAS = ("# noqa", "# type:")
"""Comments that say nothing to a reader."""


@dataclass
class Counts:
    """What one file, or the package, consists of."""

    lines: int = 0
    """Lines of code, without docstrings, comments and empty lines."""
    nodes: int = 0
    """Nodes of the syntax tree."""
    docstring_nodes: int = 0
    statements: int = 0
    """Statements, without docstrings."""
    conditionals: int = 0
    complex: int = 0
    """Functions above `MAX_COMPLEXITY`."""
    uncommented: list[str] = field(default_factory=list)
    """Names of those without a comment."""

    def __iadd__(self, other: "Counts") -> "Counts":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    @property
    def nodes_per_line(self) -> float:
        return self.nodes / max(self.lines, 1)

    @property
    def nodes_per_statement(self) -> float:
        """Rounded up to one decimal, as it is recorded."""
        return math.ceil(10 * (self.nodes - self.docstring_nodes) / max(self.statements, 1)) / 10

    @property
    def conditionals_per_100_statements(self) -> float:
        """Rounded up to two decimals, as it is recorded."""
        return math.ceil(10_000 * self.conditionals / max(self.statements, 1)) / 100


def count(text: str) -> Counts:
    """Count what a module consists of."""
    tree = ast.parse(text)
    found = Counts()
    docstring_lines: set[int] = set()
    for node in ast.walk(tree):
        found.nodes += 1
        found.conditionals += isinstance(node, ast.IfExp)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.docstring_nodes += 2
            docstring_lines.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.stmt):
            found.statements += 1
    code, comments = _lines(text)
    found.lines = len(code - docstring_lines)
    for function in functions(tree):
        if complexity(function) > MAX_COMPLEXITY:
            found.complex += 1
            if comments.isdisjoint(range(function.lineno, function.end_lineno + 1)):
                found.uncommented.append(f"{function.lineno}: {function.name}")
    return found


def _lines(text: str) -> tuple[set[int], set[int]]:
    """Return the numbers of the lines with code, docstrings included, and of those with a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(PRAGMAS):
            comments.add(token.start[0])
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code, comments


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods of a module, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def complexity(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the McCabe complexity of a function, without the functions in it, which have their own."""
    found = 1
    left = list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, DEFINITIONS):
            continue
        found += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
        left += ast.iter_child_nodes(node)
    return found


def count_package(package: Path) -> dict[str, Counts]:
    """Count each file of a package, by its path in it."""
    paths = sorted(package.rglob("*.py"))
    return {path.relative_to(package).as_posix(): count(path.read_text(encoding="utf-8")) for path in paths}


def total(files: dict[str, Counts]) -> Counts:
    """Return the sums of all files."""
    whole = Counts()
    for name, counts in files.items():
        named = [f"{name}:{function}" for function in counts.uncommented]
        whole += Counts(**{**vars(counts), "uncommented": named})
    return whole


def long_parts(package: Path) -> list[str]:
    """Return a line for each file and each function under a folder that is longer than the limits."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(package.parent)
        lines = len(text.splitlines())
        if lines > MAX_LINES_OF_FILE:
            found.append(f"WARNING: {name} has {lines} lines, more than {MAX_LINES_OF_FILE}")
        for node in functions(ast.parse(text)):
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_LINES_OF_FUNCTION:
                place = f"{name}:{node.lineno}: {node.name}"
                found.append(f"WARNING: {place} has {lines} lines, more than {MAX_LINES_OF_FUNCTION}")
    return found


def figures_of_package(whole: Counts) -> dict[str, float]:
    """Return the figures of the package that are recorded."""
    return {
        "nodes_per_statement": whole.nodes_per_statement,
        "conditionals_per_100_statements": whole.conditionals_per_100_statements,
        "complex_without_a_comment": len(whole.uncommented),
    }


def denser(files: dict[str, Counts], record: dict) -> list[str]:
    """Return a line for each figure that is greater than the record allows."""
    whole = total(files)
    found = []
    if whole.nodes_per_line > MAX_NODES_PER_LINE:
        found.append(f"the package has {whole.nodes_per_line:.2f} nodes per line, more than {MAX_NODES_PER_LINE}")
    for name, value in figures_of_package(whole).items():
        if value > record["package"][name]:
            found.append(f"the package: {name} is {value}, more than the recorded {record['package'][name]}")
    recorded = record["nodes_per_statement"]
    gone = [value for name, value in recorded.items() if name not in files]
    most_of_new = max([record["package"]["nodes_per_statement"], *gone])
    for name, counts in files.items():
        most = recorded.get(name, most_of_new)
        if counts.nodes_per_statement > most:
            found.append(f"{name} has {counts.nodes_per_statement} nodes per statement, more than {most}")
    return found


def updated(files: dict[str, Counts], record: dict, *, allow: bool) -> dict:
    """Return the record with the figures that went down; with `allow` also those that went up."""

    def lower(name: str) -> dict:
        before = {} if allow else record.get(name, {})
        return {key: min(value, before.get(key, value)) for key, value in now[name].items()}

    now = {
        "package": figures_of_package(total(files)),
        "nodes_per_statement": {name: counts.nodes_per_statement for name, counts in files.items()},
    }
    return {name: lower(name) for name in now}


def as_toml(record: dict) -> str:
    """Return the record as the text of its file."""
    package = "".join(f"{name} = {value}\n" for name, value in record["package"].items())
    files = "".join(f'"{name}" = {value}\n' for name, value in record["nodes_per_statement"].items())
    return (
        "# The figures that `make check` allows at most. tests/sizes.py explains and writes them.\n\n"
        f"[package]\n{package}\n[nodes_per_statement]\n{files}"
    )


def main(arguments: list[str], *, package: Path = PACKAGE, path: Path = RECORD) -> int:
    """Print the figures; return 1 if one of them went up."""
    parser = argparse.ArgumentParser(description="Measures how long and how dense the package's files are.")
    parser.add_argument("--write", action="store_true", help="record the figures that went down, and new files")
    parser.add_argument("--allow", action="store_true", help="with --write: record also those that went up")
    options = parser.parse_args(arguments)
    files = count_package(package)
    record = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if options.write:
        record = updated(files, record, allow=options.allow)
        path.write_text(as_toml(record), encoding="utf-8")
    whole = total(files)
    lines = [
        *long_parts(package),
        f"{len(files)} files: {whole.lines:,} lines of code, {whole.nodes_per_line:.2f} nodes per line; "
        f"{whole.nodes_per_statement} nodes per statement, {whole.conditionals_per_100_statements} conditionals per "
        "100 statements; "
        f"{whole.complex} functions above complexity {MAX_COMPLEXITY}, {len(whole.uncommented)} without a comment",
    ]
    errors = denser(files, record)
    lines += [f"ERROR: {line}" for line in errors]
    if errors:
        lines.append("Name the values and use plain statements; python tests/sizes.py --help says more.")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
