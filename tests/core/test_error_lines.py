"""An error of hfscale that ends a user's own program is one line with its exit code; any other keeps its traceback."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from hfscale.errors import UsageError, HealthError
try:
    raise UsageError("handled")
except UsageError:
    pass
{end}
"""


def run(end: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that ends with a line of code."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.mark.parametrize(
    ("end", "environment", "line", "code"),
    [
        ("raise UsageError('x is 3: give 4')", {}, "hfscale: error: x is 3: give 4\n", 2),
        ("raise HealthError('a link is slow')", {"RANK": "1"}, "hfscale: error on rank 1: a link is slow\n", 1),
    ],
)
def test_an_error_of_hfscale_is_one_line(end, environment, line, code):
    done = run(end, **environment)
    assert (done.stderr, done.returncode) == (line, code)


@pytest.mark.parametrize(
    ("end", "environment"),
    [
        ("raise KeyError('mine')", {}),
        ("raise type('OfClick', (Exception,), {'exit_code': 2})('mine')", {}),
        ("raise UsageError('x is 3')", {"HFSCALE_TRACEBACK": "1"}),
    ],
)
def test_other_errors_and_those_that_ask_for_it_have_a_traceback(end, environment):
    done = run(end, **environment)
    assert done.stderr.startswith("Traceback")
    assert done.returncode == 1


def test_a_hook_of_the_program_stays():
    done = run("sys.excepthook = lambda *error: print('mine'); raise UsageError('x')")
    assert (done.stdout, done.returncode) == ("mine\n", 1)
