"""Fixtures and settings of all tests: they run on a CPU, without the hub, and launch real processes on loopback."""

import gc
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import paths  # noqa: F401
import pytest
from fork_client import fork_server

from hfscale.core.spelling import Speaker, speaking
from hfscale.core.versions import installed, what_is_missing
from hfscale.errors import MissingDependencyError

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", WANDB_MODE="offline", WANDB_SILENT="true")
os.environ["HFSCALE_DEBUG_EXCHANGES"] = "120"  # all ranks must enter the same exchanges; they wait so many seconds
os.environ["HFSCALE_CLOUD"] = "none"  # no test sends a request to a cloud's metadata address
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background processes ignore the signal
EXTENSIONS = Path(sys.prefix, "torch_extensions")  # DeepSpeed's operators, of build_extensions.py
os.environ["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)

pytest.register_assert_rewrite("trainer_contract")
REPOSITORY = Path(__file__).parent.parent
if installed("hfscale") is None:  # make test-gpu GPU_PYTHON=…: the processes that tests start find it here
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(REPOSITORY))))
RECIPE = REPOSITORY / "recipes" / "ddp" / "train.py"
LAUNCH_TIMEOUT_S = 240
LOAD_TIMEOUT_S = 60
"""Loading an extension that is already built never takes this long."""


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    code: int
    out: str
    err: str

    def lines(self, start: str) -> list[str]:
        """Return the lines of standard error that begin with `start`."""
        return [line for line in self.err.replace("\r", "\n").splitlines() if line.startswith(start)]


def run_process(argv: list[str], cwd: Path, env: dict[str, str] | None = None) -> Finished:
    """Run a command to its end, within the time limit."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    done = subprocess.run(
        argv, cwd=cwd, env=clean | (env or {}), capture_output=True, text=True, timeout=LAUNCH_TIMEOUT_S, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def accelerate_launch(cwd: Path, config: Path, processes: int, *argv: str | Path, **env: str) -> Finished:
    """Run `accelerate launch` through the fork server, whose processes have already imported the libraries.

    With HFSCALE_TEST_LAUNCH=agent in the environment, as `make test-faults` sets it, the real command runs with
    torch's elastic agent instead, which takes some ten seconds more for each launch.
    """
    if os.environ.get("HFSCALE_TEST_LAUNCH") == "agent":
        return agent_launch(cwd, config, processes, *argv, **env)
    return run_forked("launch", _launch_words(config, processes, argv), cwd, env)


def agent_launch(cwd: Path, config: Path, processes: int, *argv: str | Path, **env: str) -> Finished:
    """Run the real `accelerate launch` command with torch's elastic agent."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    return run_process([*command, *_launch_words(config, processes, argv)], cwd, env)


def _launch_words(config: Path, processes: int, argv: Sequence[str | Path]) -> list[str]:
    """Return the arguments of `accelerate launch`; the scripts of the tests train in fp32, the recipes decide it."""
    words = ["--config_file", str(config), "--num_processes", str(processes)]
    decides = any("recipes" in Path(word).parts for word in map(str, argv[:1]))
    return [*words, *([] if decides else ["--mixed_precision", "no"]), *map(str, argv)]


def run_forked(kind: str, argv: list[str], cwd: Path, env: dict[str, str], ranks: int = 1) -> Finished:
    """Run a command through the fork server; the code is that of the first rank that failed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        job = fork_server().start(kind, argv, cwd=cwd, env=clean | env, out=out, err=err, ranks=ranks)
        codes = fork_server().wait(job, LAUNCH_TIMEOUT_S)
        return Finished(next((code for code in codes if code), 0), out.read_text(), err.read_text())


def fake_nvidia_smi(folder: Path) -> Path:
    """Write a program `nvidia-smi` that lists two GPUs, and return the folder, for PATH."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '535.104.05, NVIDIA H100'\necho '535.104.05, NVIDIA H100'\n")
    program.chmod(0o755)
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Finished]:
    """Return a function that runs one process in an empty folder: `python("script.py", "--flag")`."""

    def run(*argv: str | Path, env: dict[str, str] | None = None) -> Finished:
        return run_forked("script", list(map(str, argv)), tmp_path, env or {})

    return run


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Finished]:
    """Return a function that runs processes under `accelerate launch`: `launch(2, "script.py", "--flag")`."""

    def run(
        processes: int, *argv: str | Path, config: Path | None = None, env: dict[str, str] | None = None
    ) -> Finished:
        config = config or REPOSITORY / "accelerate_configs" / "ddp.yaml"
        return accelerate_launch(tmp_path, config, processes, *argv, **(env or {}))

    return run


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `recipe_runs.make_workplace`, which tests copy. A module that adds files to it overrides this."""
    import recipe_runs  # imports this module

    recipe_runs.warm_up()
    return recipe_runs.make_workplace(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="session")
def launch_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Return a function from a strategy to the variables that `accelerate launch` sets for its ranks."""
    known: dict[str, dict[str, str]] = {}

    def of(strategy: str) -> dict[str, str]:
        if strategy not in known:
            folder = tmp_path_factory.mktemp(strategy)
            (folder / "ds_configs").symlink_to(REPOSITORY / "ds_configs")
            script = REPOSITORY / "tests" / "workers" / "environment.py"
            processes = 4 if strategy in ("fsdp2_hsdp", "tp_pp") else 2
            done = accelerate_launch(folder, REPOSITORY / f"accelerate_configs/{strategy}.yaml", processes, script)
            assert done.code == 0, done.err[-2000:]
            known[strategy] = json.loads((folder / "environment.json").read_text())
            if strategy.startswith("zero"):
                known[strategy]["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(REPOSITORY / f"ds_configs/{strategy}.json")
        return known[strategy]

    return of


@pytest.fixture(scope="module", autouse=True)
def without_imports_in_garbage_collection() -> None:
    """Leave what is imported by now out of garbage collection, which Accelerate starts at the end of each training.

    A third of a second of each training in the test process was spent in it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def accelerates_variables() -> Iterator[None]:
    """Undo what a test changes in the variables of Accelerate: a recipe leaves its flags for compilation in them."""
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def recipes_name_flags(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let errors in the tests of what recipes share name flags, as they do under `hfscale.recipe.run`."""
    speaker: Speaker = "python"
    if request.path.parent.name == "recipe":
        speaker = "recipe"
    with speaking(speaker):
        yield


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The lines of hfscale's logger, each once.

    pytest also listens at loggers that do not propagate when a test begins; the logger does not once it has printed.
    """
    logger = logging.getLogger("hfscale")
    monkeypatch.setattr(logger, "propagate", True)
    own = [handler for handler in logger.handlers if not isinstance(handler, type(caplog.handler))]
    monkeypatch.setattr(logger, "handlers", own)
    caplog.set_level("INFO", logger="hfscale")
    return caplog


def needs(feature: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if a package is missing or too old that a feature of hfscale needs."""
    missing = what_is_missing(feature)
    return pytest.mark.skipif(missing is not None, reason=missing or "")


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that torch sees, as CUDA_VISIBLE_DEVICES spells them."""
    import torch

    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or list(map(str, range(torch.cuda.device_count())))


PLUGINS = {"pytest_timeout": "timeout(seconds)", "pytest_rerunfailures": "flaky(reruns)"}
"""Plugins without which a time limit, or a second try, is left out; and the marks that they define."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Accept the setting of a plugin that is not installed."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds, for pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """Remove the locks of an interrupted test run, for which every later load of an extension would wait."""
    for plugin, mark in PLUGINS.items():
        if importlib.util.find_spec(plugin) is None:
            config.addinivalue_line("markers", f"{mark}: of {plugin}, which is not installed")
    if not hasattr(config, "workerinput"):
        for lock in EXTENSIONS.glob("*/lock"):
            if time.time() - lock.stat().st_mtime > LOAD_TIMEOUT_S:
                lock.unlink()


def selects_gpu_tests(config: pytest.Config) -> bool:
    """Return whether `-m gpu` is given: such a run may lack packages that the other tests need."""
    return bool(config.option.markexpr == "gpu")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, import only the files that have such tests."""
    if not selects_gpu_tests(config) or not collection_path.name.startswith("test_"):
        return None
    return None if "pytest.mark.gpu" in collection_path.read_text(encoding="utf-8") else True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """With `-m gpu`, skip a file that cannot be imported because a package is missing or too old."""
    report = yield
    if report.failed and selects_gpu_tests(collector.config):
        error = report.call.excinfo.value.__cause__
        reason = missing_package(error) if isinstance(error, ImportError) else None
        if reason is not None:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {reason}")
    return report


def missing_package(error: ImportError) -> str | None:
    """Return which package an import lacks, or which of its names; None if it is hfscale or one of these files."""
    if error.name is None:
        return str(error) if isinstance(error, MissingDependencyError) else None
    package = error.name.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None:
        return f"{package} is not installed"
    if package == "hfscale" or Path(spec.origin or "").is_relative_to(REPOSITORY / "tests"):
        return None
    return f"{error} ({package} {installed(package)} is installed)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU on a machine without one; where torch cannot use the GPUs that are there, it fails."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    from hfscale.core.nvidia_driver import check_gpus_of_driver

    if not torch.cuda.is_available():
        for finding in check_gpus_of_driver():
            if finding.level == "error":
                pytest.fail(finding.message, pytrace=False)
        pytest.skip("needs a CUDA GPU, and torch sees none")


LONG_FILES = (
    "test_parallel.py",
    "test_crash_points.py",
    "test_native.py",
    "test_supervisor.py",
    "test_reshape.py",
    "test_parallel_experts.py",
    "test_preemption_ranks.py",
    "test_scaling_metrics.py",
    "test_callbacks_contract.py",
    "test_recipe_ddp.py",
    "test_strategies.py",
    "test_planner_native.py",
    "test_health_hang.py",
    "test_preemption.py",
    "test_packaging.py",
    "test_stream_position.py",
    "test_recipe_sharded.py",
    "test_overlap.py",
    "test_parallel_context.py",
    "test_planner_spread_experts.py",
    "test_standby.py",
    "test_islands.py",
    "test_checkpoint_writer.py",
    "test_model_shape.py",
    "test_trace.py",
    "test_launch_files.py",
    "test_integrations.py",
    "test_public_surface.py",
)
"""The files that take longest, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that the two workers end at about the same time.

    A test of wall-clock times runs up to three times: a stall of the machine fails it once, a defect each time.
    """
    order = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    for item in items:
        if item.get_closest_marker("timing") is not None:
            item.add_marker(pytest.mark.flaky(reruns=2))
