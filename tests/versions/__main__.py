"""Runs the package with other versions of its dependencies: python tests/versions [--short] [CORNER ...].

A corner is a row of `CORNERS`. A layered corner puts its packages in front of those of this Python; the others have an
environment of their own. Both are kept in `.venv-versions/` and made again when their pins change. Each corner imports
every module, trains on one process and under its strategies with two, and passes the contract tests of the callbacks
(not with `--short`, and not where a corner is there for one strategy). A corner with a program of others runs that
program with the callback instead.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from ports import free_port  # noqa: E402

FOLDER = REPOSITORY / ".venv-versions"
TRAINING = "tests/versions/training.py"
PROGRAMS = "tests/versions/programs.py"
OLDEST = "constraints-oldest.txt"
LAYERED = (
    "transformers",
    "tokenizers",
    "huggingface-hub",
    "accelerate",
    "datasets",
    "peft",
    "dill",
    "multiprocess",
    "fsspec",
)
"""Packages of `constraints-oldest.txt` that a layered corner takes from there."""
TEST_PACKAGES = (
    "pytest",
    "pytest-rerunfailures",
    "pytest-timeout",
    "tensorboard",
    "trackio",
    "wandb",
    "matplotlib",
    "optuna",
)
CONTRACT = (
    "tests/trainer/test_callbacks_contract.py",
    "tests/checkpoint/test_spot_checkpoint.py",
    "tests/metrics/test_scaling_metrics.py",
    "tests/lr_scaling/test_lr_scaling_callback.py",
    "tests/trainer/test_integrations.py",
)
PIPELINES = "tests/parallel"
PIP_REASONS = ("The user requested (constraint)", "ERROR: ")
"""What the lines begin with in which pip says why it cannot install something, the most telling first."""
TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class Corner:
    """One set of versions."""

    name: str
    pins: tuple[str, ...] = ()
    """Requirements, layered or as constraints; names without a version are the newest."""
    oldest: bool = False
    """Whether the pins of `constraints-oldest.txt` are added for the other packages."""
    python: str | None = None
    """Interpreter of the corner's own environment; None: layered on this one."""
    strategies: tuple[str, ...] = ("ddp", "fsdp2")
    """What runs on two processes; `native`: models that transformers distributes while it loads them."""
    contract: bool = True
    """Whether the contract tests run, too."""
    more_tests: tuple[str, ...] = ()
    """Folders of tests that run with the contract tests."""
    short: bool = False
    """Whether `--short` runs it."""
    script: str | None = None
    """A script of this folder that is run with an empty folder instead of all else."""
    program: str | None = None
    """A program of others, with its version, that `programs.py` runs with the callback instead of all else."""


NEWEST = ("torch", "transformers<6", "accelerate", "datasets", "peft")
CORNERS = (
    Corner(name="transformers-4.57", pins=("accelerate==1.13.0",), oldest=True, short=True),
    Corner(
        name="transformers-5.0",
        pins=("transformers==5.0.0", "tokenizers==0.22.2", "huggingface-hub==1.33.0", "accelerate==1.11.0"),
    ),
    Corner(
        name="transformers-5.15",
        pins=(
            "transformers==5.15.1",
            "tokenizers==0.22.2",
            "huggingface-hub==1.33.0",
            "accelerate==1.14.0",
            "peft==0.19.0",
        ),
        short=True,
    ),
    # Its pins are those of axolotl 0.19; NeMo AutoModel 0.7 pins transformers 5.18.
    Corner(
        name="transformers-5.16",
        pins=("transformers==5.16.1", "huggingface-hub==1.33.0", "accelerate==1.13.0", "peft==0.20.0"),
        more_tests=("tests/checkpoint/test_data_order.py",),  # its Trainer resumes a batch sampler in another order
    ),
    Corner(name="transformers-5.18", pins=("transformers==5.18.0",)),
    *(
        Corner(
            name=f"transformers-{version}",
            pins=(f"transformers=={version}.0",),
            strategies=("native",),
            contract=False,
        )
        for version in ("5.19", "5.20", "5.21", "5.22", "5.24")
    ),
    Corner(name="pinned", strategies=("ddp", "fsdp2", "native")),
    # torch 2.6 has no FSDP2 on CPUs: their streams cannot record events.
    Corner(name="oldest", oldest=True, python="python3.11", strategies=("ddp",)),
    Corner(
        name="torch-2.15",
        pins=("torch==2.15.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "peft==0.21.2"),
        python="python3.11",
        strategies=("ddp", "fsdp2", "native"),
        more_tests=(PIPELINES,),
    ),
    Corner(name="newest", pins=NEWEST, python="python3.11"),
    Corner(name="newest-python-3.13", pins=NEWEST, python="python3.13"),
    Corner(name="bitsandbytes", pins=("bitsandbytes==0.50.2",), script="quantized.py"),
    Corner(name="ray", pins=("ray==2.60.0",), script="ray_train.py"),
    Corner(name="llama-factory", program="llamafactory==0.9.5", python="python3.11"),
    Corner(name="ms-swift", program="ms-swift==4.6.0", python="python3.11"),
    Corner(name="axolotl", program="axolotl==0.19.0", python="python3.11"),
)


def main() -> int:
    """Run the corners that the command line names, by default all; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python tests/versions")
    parser.add_argument("--short", action="store_true", help="two layered corners, without the contract tests")
    parser.add_argument("corners", nargs="*", metavar="CORNER", help=", ".join(corner.name for corner in CORNERS))
    asked = parser.parse_args()
    unknown = set(asked.corners) - {corner.name for corner in CORNERS}
    if unknown:
        parser.error(
            f"no corner is called {', '.join(sorted(unknown))}: choose from {', '.join(c.name for c in CORNERS)}"
        )
    chosen = [
        corner
        for corner in CORNERS
        if (corner.name in asked.corners or not asked.corners) and (corner.short or not asked.short)
    ]
    for corner in [corner for corner in chosen if corner.python is not None and shutil.which(corner.python) is None]:
        print(f"{corner.name}: not run, because {corner.python} is not installed")
        chosen.remove(corner)
    failed = [corner.name for corner in chosen if not passes(corner, contract=not asked.short)]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} corners passed" + "".join(f"\nfailed: {n}" for n in failed))
    return 1 if failed else 0


def passes(corner: Corner, *, contract: bool) -> bool:
    """Set up one corner and run its checks; print one line for each."""
    start = time.monotonic()
    try:
        python, path = set_up(corner)
    except NotInstalledError as error:
        print(f"{corner.name}: {error}", flush=True)
        return False
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")} | {
        "PYTHONPATH": os.pathsep.join([*path, str(REPOSITORY)]),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "HFSCALE_CLOUD": "none",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }
    print(f"{corner.name}: {versions(python, environ)}", flush=True)
    if corner.program is not None:
        with tempfile.TemporaryDirectory() as folder:
            return run(corner, corner.program, [python, PROGRAMS, corner.program.partition("==")[0], folder], environ)
    if corner.script is not None:
        with tempfile.TemporaryDirectory() as folder:
            return run(corner, corner.script, [python, f"tests/versions/{corner.script}", folder], environ)
    with tempfile.TemporaryDirectory() as folder:
        good = [run(corner, "imports and one process", [python, TRAINING, "single", folder], environ)]
        for strategy in corner.strategies:
            launch = [python, "-m", "accelerate.commands.launch", "--num_processes", "2", "--mixed_precision", "no"]
            config = "ddp" if strategy == "native" else strategy
            launch += ["--config_file", f"accelerate_configs/{config}.yaml", "--main_process_port", str(free_port())]
            argv = [*launch, TRAINING, strategy, f"{folder}/{strategy}"]
            good.append(run(corner, f"{strategy} on two processes", argv, environ))
    if contract and corner.contract:
        argv = [python, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", "-m", "not (gpu or faults or timing)"]
        good.append(run(corner, "contract tests", [*argv, *CONTRACT, *corner.more_tests], environ))
    print(f"{corner.name}: {time.monotonic() - start:.0f} s", flush=True)
    return all(good)


def set_up(corner: Corner) -> tuple[str, list[str]]:
    """Install a corner's packages if that has not been done, and return its Python and its search path."""
    pins = [*corner.pins, *([corner.program] if corner.program else [])]
    if corner.oldest:
        lines = (REPOSITORY / OLDEST).read_text(encoding="utf-8").splitlines()
        oldest = [line for line in lines if line and not line.startswith("#")]
        own = {pin.partition("==")[0] for pin in corner.pins}
        wanted = {pin: pin.partition("==")[0] for pin in oldest}
        pins += [pin for pin, name in wanted.items() if name not in own and (corner.python or name in LAYERED)]
    folder = FOLDER / corner.name
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8") if corner.python else ""
    key = hashlib.sha256("\n".join([*pins, sys.version, project]).encode()).hexdigest()
    python = str(folder / "bin" / "python") if corner.python else sys.executable
    if not (folder / "key").is_file() or (folder / "key").read_text() != key:
        shutil.rmtree(folder, ignore_errors=True)
        if corner.python:
            subprocess.run([corner.python, "-m", "venv", str(folder)], check=True)
            (folder / "pins.txt").write_text("\n".join(pin for pin in pins if "=" in pin or "<" in pin))
            names = [pin for pin in pins if pin == corner.program or ("=" not in pin and "<" not in pin)]
            if corner.program is None:  # they would change the versions that pip chooses for a program
                names += TEST_PACKAGES
            install = [python, "-m", "pip", "install", "-c", str(folder / "pins.txt"), *names]
            quietly([*install, "-e", f"{REPOSITORY}[recipes]"])
        elif pins:
            quietly([python, "-m", "pip", "install", "--no-deps", "--target", str(folder), *pins])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "key").write_text(key)
    return python, [] if corner.python else [str(folder)]


class NotInstalledError(Exception):
    """pip cannot install the versions of a corner; the message is one line."""


def quietly(argv: list[str]) -> None:
    """Run pip.

    Raises:
        NotInstalledError: it failed. The message has pip's reasons, of which a version that the configuration of this
            machine excludes is one.
    """
    done = subprocess.run(
        [*argv, "--no-compile", "--disable-pip-version-check"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
        reasons = [line for start in PIP_REASONS for line in said if line.startswith(start)] or ["pip failed"]
        raise NotInstalledError(
            f"cannot be installed: {reasons[0]}. PIP_CONFIG_FILE=/dev/null leaves out the constraints in the "
            "configuration of pip"
        )


def versions(python: str, environ: dict[str, str]) -> str:
    """Return the versions that a corner really has."""
    code = (
        "import platform; from hfscale.core.versions import installed; print('python', platform.python_version(), "
        "*(f'{name} {installed(name)}' for name in ('torch', 'transformers', 'accelerate', 'datasets', 'peft')))"
    )
    done = subprocess.run(
        [python, "-c", code], env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def run(corner: Corner, check: str, argv: list[str], environ: dict[str, str]) -> bool:
    """Run one check, print whether it passed, which tests it skipped and why, and its last lines if it failed."""
    done = subprocess.run(argv, env=environ, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S)
    print(f"{corner.name}: {check}: {'failed' if done.returncode else 'passed'}", flush=True)
    lines = (done.stdout + done.stderr).splitlines()
    shown = lines[-40:] if done.returncode else [line for line in lines if line.startswith("SKIPPED")]
    if shown:
        print("\n".join(shown), flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
