"""Prints a warning for each long file and each long function of the package; it never fails.

A module is as long as its idea, and a function fits on a screen or two: a long one is a reason to look, not an error.
`make check` runs it as `python tests/sizes.py`.
"""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "hfscale"
MAX_LINES_OF_FILE = 600
MAX_LINES_OF_FUNCTION = 80


def warnings(package):
    """Return a line for each file and each function under a folder that is longer than the limits."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(package.parent)
        lines = len(text.splitlines())
        if lines > MAX_LINES_OF_FILE:
            found.append(f"WARNING: {name} has {lines} lines, more than {MAX_LINES_OF_FILE}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_LINES_OF_FUNCTION:
                    place = f"{name}:{node.lineno}: {node.name}"
                    found.append(f"WARNING: {place} has {lines} lines, more than {MAX_LINES_OF_FUNCTION}")
    return found


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in warnings(PACKAGE))
