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


GROUP = """
import sys
import torch.distributed as dist
from hfscale.errors import UsageError
{before}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{end}
"""


def in_a_process_group(end: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program that ends with a line of code, after torch has set an excepthook of its own."""
    program = GROUP.format(before=before, end=end)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("before", ["", "UsageError('handled')"], ids=["later", "before"])
def test_an_error_is_one_line_in_a_process_group_too(before):
    """Where hfscale has made an error before the group, torch's hook is around its own."""
    done = in_a_process_group("raise UsageError('x is 3: give 4')", before)
    assert done.stderr.splitlines()[-1] == "hfscale: error: x is 3: give 4"
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize("before", ["", "UsageError('handled')"], ids=["later", "before"])
def test_other_errors_keep_the_traceback_of_torch_with_the_rank(before):
    done = in_a_process_group("UsageError('handled'); raise KeyError('mine')", before)
    assert "[rank0]: Traceback" in done.stderr
    assert "[rank0]: KeyError: 'mine'" in done.stderr
    assert done.returncode == 1
