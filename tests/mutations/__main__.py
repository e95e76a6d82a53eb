"""Breaks the package on purpose, one line at a time, and checks that the tests notice: `make test-mutations`.

Each file PACKAGE.toml beside this one lists mutations:

    [[mutation]]
    file = "hfscale/checkpoint/store.py"   # a file of the package
    old = "…"                              # occurs once in it
    new = "…"                              # what it is replaced by: a mistake that somebody could make
    tests = "tests/checkpoint/test_checkpoint_store.py -k rotation"   # arguments of pytest

A copy of the repository is mutated, and the tests run there. A mutation is caught if a test fails; one whose tests
pass, or do not end in time, is not. The tests of a package run once without a mutation first. Arguments: names of
packages, and `--part I/N` for every N-th mutation, beginning with the I-th (from 1). The exit code is 1 if a mutation
was not caught. With HFSCALE_RESULTS the counts are kept in a file (tests/faults/results.py).
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "faults"))

from results import keep_result  # noqa: E402

REPOSITORY = FOLDER.parents[1]
TIMEOUT_S = 300
COPIED = ("hfscale", "tests", "recipes", "accelerate_configs", "ds_configs", "pyproject.toml")
LIBRARIES = ("torch", "transformers.trainer", "accelerate", "datasets", "safetensors.torch")
NO_TESTS = 5  # of pytest: nothing was collected


def read(package):
    """Return the mutations of one package."""
    return tomllib.loads((FOLDER / f"{package}.toml").read_text(encoding="utf-8"))["mutation"]


def packages():
    """Return the packages that have a list."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def run(copy, tests):
    """Run pytest in the copy, in a fork of this process, which has imported the libraries; return code and output.

    The code is None after the time limit.
    """
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(copy)
            sys.path.insert(0, str(copy))
            os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
            sys.dont_write_bytecode = True
            code = 1
            try:
                code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = wait(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also what a test has left behind
        output.seek(0)
        return code, output.read().decode(errors="replace")


def wait(pid):
    """Return the exit code of a child; None after the time limit."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def mutate(copy, mutation):
    """Apply a mutation to the copy, and return a function that undoes it."""
    path = copy / mutation["file"]
    text = path.read_text(encoding="utf-8")
    if text.count(mutation["old"]) != 1:
        sys.exit(f"{mutation['file']} has {text.count(mutation['old'])} times, and not once: {mutation['old']}")
    path.write_text(text.replace(mutation["old"], mutation["new"]), encoding="utf-8")
    return lambda: path.write_text(text, encoding="utf-8")


def check(copy, package, part, parts):
    """Run the mutations of a package; return how many were caught, and all that were not."""
    mutations = read(package)[part - 1 :: parts]
    tests = sorted({mutation["tests"] for mutation in mutations})
    for arguments in tests:
        code, output = run(copy, shlex.split(arguments))
        if code != 0:
            sys.exit(f"without a mutation, pytest {arguments} ends with {code}:\n{output[-3000:]}")
    missed = []
    for mutation in mutations:
        began = time.monotonic()
        undo = mutate(copy, mutation)
        code, output = run(copy, shlex.split(mutation["tests"]))
        undo()
        if code == NO_TESTS:
            sys.exit(f"no test is selected by {mutation['tests']}")
        outcome = "time limit" if code is None else "caught" if code else "NOT CAUGHT"
        if outcome != "caught":
            missed.append(mutation)
        shown = mutation["new"].strip().splitlines() or ["(removed)"]
        say(f"{outcome:<10} {time.monotonic() - began:5.0f} s  {mutation['file']}: {shown[0]}")
    return len(mutations) - len(missed), missed


def say(line):
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main():
    """Run the mutations that the arguments name, and print a score for each package."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", choices=[*packages(), []], metavar="PACKAGE")
    parser.add_argument("--part", default="1/1", metavar="I/N")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    for library in LIBRARIES:
        import_module(library)
    total = 0
    with tempfile.TemporaryDirectory(prefix="hfscale-mutations-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        scores = {}
        for package in arguments.packages or packages():
            began = time.monotonic()
            caught, missed = check(copy, package, part, parts)
            counts = {"mutations": caught + len(missed), "caught": caught, "seconds": round(time.monotonic() - began)}
            if parts == 1:
                keep_result(package, counts)
            scores[package] = f"{caught} of {caught + len(missed)} caught"
            total += len(missed)
    for package, score in scores.items():
        say(f"{package}: {score}")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
