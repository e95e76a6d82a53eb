"""Measures scaling efficiency: runs the same recipe on 1, 2, 4 and more processes, in alternating order.

With equal work per process it is weak scaling, and with equal work in total it is strong scaling. Each repeat runs
every number of processes once, first in rising and then in falling order, so that a machine that slows down affects
all of them. Efficiency is the median over repeats of the ratio inside a repeat.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from hfscale.core.counts import counted
from hfscale.core.findings import Finding
from hfscale.core.flags import read_yaml_mapping, split_off_config
from hfscale.core.records import read_events, read_records
from hfscale.core.redaction import redact
from hfscale.core.run_files import JSONL_NAME, RANKS_NAME, TIMELINE_NAME
from hfscale.core.spelling import spelled
from hfscale.errors import HfScaleError, ParameterError, StorageError, UsageError
from hfscale.facts.batch_split import split_batch
from hfscale.metrics.baseline import Baseline, Mode, Workload
from hfscale.metrics.triage import NEWEST_KEYS, TriageInput, slowest_rank, triage
from hfscale.report.summary import keys_of_run

LOGS_PER_RUN = 8
LOG_NAME = "output.txt"
_SHOWN_LINES = 3
_SHARE_KEYS = {
    "data wait": "scaling/data_wait_fraction",
    "exposed communication": "scaling/comm_fraction",
    "bubble": "scaling/bubble_fraction",
}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Describes the runs of a sweep.

    Raises:
        UsageError: a value is wrong, or with strong scaling the global batch does not divide.
    """

    recipe: Sequence[str]
    """The path of the recipe's script, and its flags."""
    gpus: Sequence[int]
    """Numbers of processes, in rising order."""
    mode: Mode
    """`weak`: equal work per process; `strong`: equal work in total."""
    repeats: int
    """How often each number of processes runs."""
    steps: int
    """Optimizer steps of each run."""
    config_file: Path
    """The config file for `accelerate launch`."""
    output_dir: Path
    """Where the measurements are kept; checkpoints and models are deleted."""
    timeout_s: float
    """Seconds that each run may take."""

    def __post_init__(self) -> None:
        if not self.recipe:
            raise UsageError(
                "give the recipe after --, for example: hfscale sweep --gpus 1,2 -- recipes/ddp/train.py"
            )
        if not Path(self.recipe[0]).is_file():
            raise UsageError(
                f"recipe {self.recipe[0]} is not a file: give a script, then its flags"
            )
        if self.repeats < 1:
            raise ParameterError("repeats", self.repeats, "it must be at least 1")
        if self.steps < 2 * LOGS_PER_RUN:
            raise ParameterError(
                "steps", self.steps, f"a measurement needs at least {2 * LOGS_PER_RUN}"
            )
        if self.mode == "strong":
            for number in self.gpus:
                # Reports a batch that does not divide before anything runs
                self.batch_flags(number)

    def batch_flags(self, number: int) -> list[str]:
        """Return the flags that keep the global batch on a number of processes; none for weak scaling.

        Args:
            number (`int`): the number of processes.

        Raises:
            UsageError: the recipe's flags have no valid batch size, or the global batch does not divide.
        """
        if self.mode == "weak":
            return []
        per_device = _flag_value(self.recipe, "per_device_train_batch_size")
        if per_device is None:
            mode = spelled("mode", self.mode)
            raise UsageError(
                f"{mode} keeps the global batch: give --per_device_train_batch_size with the recipe's flags"
            )
        total = (
            per_device
            * (_flag_value(self.recipe, "gradient_accumulation_steps") or 1)
            * self.gpus[0]
        )
        split = split_batch(total, number, per_device)
        if split is None:
            raise ParameterError(
                "mode",
                self.mode,
                f"a global batch of {total} sequences does not divide over {number} processes; give a "
                f"multiple of {number}",
            )
        per_device, accumulation = split
        return [
            f"--per_device_train_batch_size={per_device}",
            f"--gradient_accumulation_steps={accumulation}",
        ]

    def command(self, number: int, output_dir: Path) -> list[str]:
        """Return the command line of one run.

        Args:
            number (`int`): the number of processes.
            output_dir (`Path`): the output directory of the run.

        Raises:
            UsageError: with strong scaling, the flags of the batch are missing or the global batch does not divide.
        """
        launcher = [sys.executable, "-m", "accelerate.commands.launch"]
        launcher += ["--config_file", str(self.config_file), "--num_processes", str(number)]
        flags = {
            "output_dir": str(output_dir),
            "max_steps": str(self.steps),
            "logging_steps": str(max(1, self.steps // LOGS_PER_RUN)),
            "save_strategy": "no",
            "eval_strategy": "no",
            "report_to": "none",
            "disable_tqdm": "true",
            "resume_from_checkpoint": "false",
        }
        own_flags = [text for name, value in flags.items() for text in (f"--{name}", value)]
        return [*launcher, *self.recipe, *self.batch_flags(number), *own_flags]


@dataclass(kw_only=True)
class Measurement:
    """Holds the measurements of the runs on one number of processes."""

    gpus: int
    """Number of processes."""
    rates: list[float] = field(default_factory=list)
    """Tokens/s/GPU of each repeat."""
    keys: list[Mapping[str, float]] = field(default_factory=list)
    """Medians of the metric keys of each repeat; of those in `NEWEST_KEYS` the newest values."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the run does: the `workload` event of its timeline."""

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Median speed over the repeats."""
        return statistics.median(self.rates)

    def median(self, key: str) -> float | None:
        """Return the median of a metric over the repeats that have it, or None if none has it.

        Args:
            key (`str`): the metric key, such as `scaling/mfu`.
        """
        values = [keys[key] for keys in self.keys if key in keys]
        return statistics.median(values) if values else None

    def efficiency(self, base: "Measurement") -> float:
        """Return the scaling efficiency: the median over the repeats of this speed over that of `base`.

        Args:
            base (`Measurement`): the measurement on the fewest processes, with as many repeats.
        """
        return statistics.median(
            own / other for own, other in zip(self.rates, base.rates, strict=True)
        )

    def spread(self) -> float:
        """Return (largest - smallest) / median speed; smaller differences between numbers of GPUs are noise."""
        return (max(self.rates) - min(self.rates)) / self.tokens_per_s_per_gpu

    def losses(self, base: "Measurement") -> dict[str, float]:
        """Return the share of the time that each cause takes from the efficiency; `not measured` is the rest.

        Args:
            base (`Measurement`): the measurement on the fewest processes, with as many repeats.

        Returns:
            `dict[str, float]`: the share of each cause that takes more than 0.1%.
        """
        lost = max(1 - self.efficiency(base), 0.0)
        added = {
            cause: (self.median(key) or 0.0) - (base.median(key) or 0.0)
            for cause, key in _SHARE_KEYS.items()
        }
        waiting = slowest_rank(keys_of_run(self.median, self.median))
        if waiting is not None:
            added[waiting.check] = waiting.share or 0.0
        added = {cause: share for cause, share in added.items() if share > 0}
        scale = min(1.0, lost / sum(added.values())) if added else 0.0
        losses = {cause: share * scale for cause, share in added.items()}
        losses["not measured"] = lost - sum(losses.values())
        return {cause: share for cause, share in losses.items() if share > 1e-3}

    def bottleneck(self, base: "Measurement") -> Finding | None:
        """Return the bottleneck to look at first, or None if the triage finds none.

        Args:
            base (`Measurement`): the measurement on the fewest processes, with as many repeats.
        """
        measured = keys_of_run(self.median, self.median)
        measured["scaling/efficiency"] = self.efficiency(base)
        tokens = self.facts.get("tokens_per_gpu")
        return triage(
            TriageInput.from_keys(measured, tokens_per_gpu=int(tokens) if tokens else None)
        )

    def baseline(self) -> Baseline:
        """Return the baseline that later runs are compared with.

        Raises:
            HfScaleError: the run has not recorded what it does.
        """
        try:
            workload = Workload(**{each.name: self.facts[each.name] for each in fields(Workload)})
        except KeyError as error:
            raise HfScaleError(
                f"no baseline is recorded: the {TIMELINE_NAME} of the run has no {error}"
            ) from None
        return Baseline(
            workload=workload,
            world_size=self.gpus,
            tokens_per_s_per_gpu=self.tokens_per_s_per_gpu,
            strategy=str(self.facts.get("strategy", "unknown")),
        )


def run_sweep(sweep: Sweep, *, log: Callable[[str], None]) -> list[Measurement]:
    """Run a sweep.

    Args:
        sweep (`Sweep`): the runs.
        log (`Callable[[str], None]`): called with one line as each run ends.

    Returns:
        `list[Measurement]`: the measurements, in order of the number of processes.

    Raises:
        HfScaleError: a run failed, took too long or left no measurements.
        StorageError: the output directory cannot be written.
    """
    found = {number: Measurement(gpus=number) for number in sweep.gpus}
    for repeat in range(sweep.repeats):
        for number in sweep.gpus if repeat % 2 == 0 else tuple(reversed(sweep.gpus)):
            kept = sweep.output_dir / f"{number}-gpus" / f"repeat-{repeat + 1}"
            _one_run(sweep, number, kept)
            _read(found[number], kept)
            rate = found[number].rates[-1]
            log(f"{counted(number, 'process')}, repeat {repeat + 1}: {rate:,.0f} tokens/s/GPU")
    return list(found.values())


def _one_run(sweep: Sweep, number: int, kept: Path) -> None:
    """Run once, and keep the measurements; everything else that the run wrote is deleted with its folder."""
    try:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".run-", dir=sweep.output_dir) as folder:
            output_dir = Path(folder) / "out"
            _launch(sweep.command(number, output_dir), kept / LOG_NAME, sweep)
            for name in (JSONL_NAME, TIMELINE_NAME, RANKS_NAME):
                if (output_dir / name).is_file():
                    shutil.move(output_dir / name, kept / name)
    except OSError as error:
        given = spelled("output_dir", str(sweep.output_dir))
        raise StorageError(f"{given} cannot be written: {error.strerror}") from None


def _launch(command: Sequence[str], log: Path, sweep: Sweep) -> None:
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(  # noqa: S603  # a list of arguments, without a shell
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(sweep.gpus),
        )
        try:
            code = process.wait(timeout=sweep.timeout_s)
        except subprocess.TimeoutExpired:
            end_launcher(process)
            raise HfScaleError(
                f"a run took longer than {sweep.timeout_s:.0f} s: see {log}, or give --timeout"
            ) from None
        except BaseException:
            end_launcher(process)
            raise
    # The output of a recipe may contain secrets from its command line.
    log.write_text(redact(log.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
    if code != 0:
        raise HfScaleError(
            f"a run ended with exit code {code}: {failure_reason(log)} (full output: {log})"
        )


def end_launcher(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the launcher, which forwards it: SIGKILL at once would leave the workers running."""
    process.terminate()
    try:
        process.wait(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def failure_reason(log: Path) -> str:
    """Return the error line of hfscale in a run's output, or else its last lines."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("hfscale: error")]
    return (
        errors[0].removeprefix("hfscale: error: ") if errors else " / ".join(lines[-_SHOWN_LINES:])
    )


def environment(gpus: Sequence[int], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of the runs.

    Without GPUs every process gets as many threads as in the largest run; one process alone must not use all cores.

    Args:
        gpus (`Sequence[int]`): the numbers of processes of the sweep.
        environ (`Mapping[str, str]`): the environment of this process; its `OMP_NUM_THREADS` takes precedence.
    """
    threads = max(1, (os.cpu_count() or 1) // max(gpus))
    return {"OMP_NUM_THREADS": str(threads), **environ}


def _read(measurement: Measurement, kept: Path) -> None:
    records = [r for r in read_records(kept / JSONL_NAME) if "scaling/tokens_per_s_per_gpu" in r]
    if len(records) < 3:
        raise HfScaleError(
            f"the run left too few measurements in {kept / JSONL_NAME}: its Trainer needs ScalingCallback or "
            "ScalingMetricsCallback, and its data must suffice for --steps"
        )
    steady = records[2:]  # the first two logs include start-up and warm-up
    names = {
        key for record in steady for key, value in record.items() if isinstance(value, int | float)
    }
    medians = {name: statistics.median([r[name] for r in steady if name in r]) for name in names}
    # A judgement about the steps before: the newest one has seen all of them
    newest = {name: r[name] for r in steady for name in NEWEST_KEYS if name in r}
    measurement.keys.append(medians | newest)
    measurement.rates.append(medians["scaling/tokens_per_s_per_gpu"])
    measurement.facts = next(
        (e for e in reversed(read_events(kept)) if e["event"] == "workload"), {}
    )


def _flag_value(recipe: Sequence[str], name: str) -> int | None:
    """Return the integer given as `--name N` or `--name=N`, or else in the recipe's `--config` file, or None."""
    rest, config = split_off_config(recipe[1:])
    found: object = None
    if config is not None:
        found = read_yaml_mapping(config, None).get(name)
    for word, following in pairwise([*rest, ""]):
        if word == f"--{name}":
            found = following
        elif word.startswith(f"--{name}="):
            found = word.partition("=")[2]
    if found is None:
        return None
    try:
        number = int(str(found))
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"--{name} is {found}: it must be a positive integer")
    return number
