"""`hfscale tune`: measures the best layouts of a plan on this machine, and writes the fastest and what was learnt."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfscale.core.disk_errors import writing
from hfscale.core.options import check_options
from hfscale.core.shipped import find_config, shipped_root
from hfscale.core.spelling import spelled
from hfscale.core.text_files import parse_json
from hfscale.errors import HfScaleError, UsageError
from hfscale.facts.hardware import Accelerator
from hfscale.facts.own_hardware import find_accelerator, user_hardware_file
from hfscale.planner.command_line import make_command
from hfscale.planner.option_fields import HARDWARE, OUTPUT, SEARCH, option, same_option
from hfscale.planner.options import JsonOption, PlanOptions, PlanOutput, a_count
from hfscale.planner.plan import Plan, plan
from hfscale.tune.decisions import (
    Candidate,
    Correction,
    candidates,
    correct,
    number_of_runs,
    successive_halving,
)

if TYPE_CHECKING:
    from hfscale.core.launch_file import Word
    from hfscale.planner.job import Job
    from hfscale.tune.launch_command import RecipeCommand
    from hfscale.tune.trial import Trial

ALL_CHOICES = 10_000
"""More than a plan has: micro-batches of the choices are compared before some are left out."""
BEST = "best"
"""The folder of the fastest configuration."""
EDITABLE_FILES = ("accelerate.yaml", "recipe.yaml", "launch.sh", "deepspeed.json")
"""Files of a configuration that a user may have changed."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions(JsonOption):
    """The flags of `hfscale tune`."""

    gpu: str | None = option(
        None,
        group=HARDWARE,
        flag_of=("tune",),
        help="Hardware to plan with first",
        unset="this machine, which is measured",
    )
    steps: int = option(
        10,
        group=SEARCH,
        flag_of=("tune",),
        check=a_count,
        help="Optimizer steps to measure in the first round",
    )
    top: int = same_option(
        PlanOptions, "top", 5, function="tune", help="Number of configurations to run"
    )
    deadline: float = same_option(
        PlanOptions,
        "deadline",
        1.0,
        function="tune",
        help="Duration that all runs together may take",
    )
    budget: float | None = same_option(
        PlanOptions, "budget", None, function="tune", help="Cost that all runs together may have"
    )
    usd_per_gpu_hour: float | None = same_option(
        PlanOptions, "usd_per_gpu_hour", None, function="tune", help="Your price, for --budget"
    )
    model: str | None = option(
        None,
        group=HARDWARE,
        flag_of=("tune",),
        help="Model to plan for, if the script is no recipe: a built-in name, hub id or config.json",
    )
    seq_len: int | None = option(
        None,
        group=HARDWARE,
        flag_of=("tune",),
        check=a_count,
        help="Tokens per sequence, if the script is no recipe",
    )
    output_dir: Path = option(
        Path("runs/tune"),
        group=OUTPUT,
        flag_of=("tune",),
        help="Where measurements and configs are kept",
    )
    force: bool = same_option(
        PlanOutput,
        "force",
        False,
        function="tune",
        help="Also replace configs of --output-dir that you have changed or written",
    )


def run(command: list[str] | None, flags: dict[str, Any]) -> int:
    """Run the best configurations of a plan; return the exit code, 1 if none could be measured.

    Args:
        command (`list[str]`, *optional*): the launch command of a recipe.
        flags (`dict[str, Any]`): the flags of `TuneOptions`.
    """
    options = TuneOptions(**flags)
    check_options(TuneOptions, vars(options))
    if (options.budget is None) != (options.usd_per_gpu_hour is None):
        both = f"{spelled('budget')} and {spelled('usd_per_gpu_hour')}"
        raise UsageError(f"{both} belong together: give both or neither")
    from hfscale.tune.launch_command import read_command

    # The processes of a run are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked = read_command(command or [], model=options.model, seq_len=options.seq_len)
    seconds = options.deadline * 3600
    if options.budget is not None and options.usd_per_gpu_hour is not None:
        seconds = min(seconds, options.budget / options.usd_per_gpu_hour / asked.processes * 3600)
    ends = time.monotonic() + seconds
    row = (
        _measure_machine(asked.processes) if options.gpu is None else find_accelerator(options.gpu)
    )
    found = plan_command(asked, row)
    tuning = Tuning(
        command=asked, plan=found, output_dir=options.output_dir, ends=ends, force=options.force
    )
    tuning.choose(options.top)
    tuning.run(options.steps)
    chosen = tuning.chosen
    answer = tuning.to_dict()
    if chosen is not None:
        answer["files"] = [str(path) for path in tuning.write_best(chosen)]
        answer["hardware"] = _correct(tuning, row)
    with writing(f"--output-dir {options.output_dir}", "give another folder"):
        (options.output_dir / "tune.json").write_text(
            json.dumps(answer, indent=1) + "\n", encoding="utf-8"
        )
    if options.as_json:
        print(json.dumps(answer))
    else:
        _show(answer)
    return 0 if chosen is not None else 1


def plan_command(asked: "RecipeCommand", row: Accelerator) -> Plan:
    """Plan for what a launch command trains.

    Args:
        asked (`RecipeCommand`): the command.
        row (`Accelerator`): the machine's devices.

    Raises:
        HfScaleError: no layout of the plan fits.
    """
    found = plan(
        asked.model,
        gpu=row,
        gpus=asked.processes,
        gpus_per_node=asked.processes,
        seq_len=asked.seq_len,
        global_batch=asked.global_batch,
        method=asked.method,
        lora_rank=asked.flags.lora_r,
        precision=asked.precision(has_bf16=row.bf16_tflops is not None),
        optimizer=asked.optimizer,
        compile=_compile(asked),
        liger=_liger(asked),
        task=asked.task,
        top=ALL_CHOICES,
    )
    if not found.choices:
        reasons = "; ".join(dict.fromkeys(rejected.reason for rejected in found.rejected[:3]))
        raise HfScaleError(f"no layout fits {asked.processes} x {row.name}: {reasons}")
    return found


def _compile(asked: "RecipeCommand") -> bool | None:
    """Whether layers are compiled; None where that is the default of a recipe."""
    if asked.flags.torch_compile or not asked.is_recipe:
        return bool(asked.flags.torch_compile)
    regional: bool | None = asked.flags.torch_compile_regional
    return regional


def _liger(asked: "RecipeCommand") -> bool | None:
    """Whether the loss is fused; None where the planner may choose, since a recipe then has the flag for it."""
    if not asked.is_recipe:
        return bool(asked.flags.use_liger_kernel)
    return asked.flags.use_liger_kernel if asked.task == "text" else False


def _measure_machine(processes: int) -> Accelerator:
    """Calibrate this machine in processes of their own, whose memory is free again when the runs begin."""
    print(
        f"hfscale: measuring this machine with {processes} processes (--gpu NAME skips it)",
        file=sys.stderr,
    )
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(find_config("ddp").path),
    ]
    launcher += [
        "--num_processes",
        str(processes),
        "--module",
        "hfscale",
        "plan",
        "--calibrate",
        "--json",
    ]
    done = subprocess.run(launcher, capture_output=True, text=True, check=False)  # noqa: S603  # without a shell
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        last = " ".join((done.stderr.strip().splitlines() or ["no output"])[-1].split())
        raise HfScaleError(f"this machine could not be measured ({last}): give --gpu NAME")
    return find_accelerator(parse_json(lines[-1])["gpu"]["name"])


@dataclass(kw_only=True)
class Tuning:
    """Runs configurations of a launch command and keeps their results."""

    command: "RecipeCommand"
    """What the user launches."""
    plan: Plan
    """The plan for it."""
    output_dir: Path
    """Where measurements and configs are kept."""
    ends: float
    """Time of the monotonic clock from which no run may begin or go on."""
    force: bool = False
    """Whether files are replaced that the user has changed."""
    configurations: dict[str, Candidate] = field(default_factory=dict)
    """The configurations by their names, in the order of their predicted times."""
    results: "dict[str, tuple[Trial, int]]" = field(default_factory=dict)
    """The newest run of each configuration, and its number of steps."""

    def choose(self, number: int) -> None:
        """Choose the configurations to run.

        Args:
            number (`int`): how many at most.

        Raises:
            HfScaleError: the script can run none.
            UsageError: a file of an earlier run, which would be replaced, was changed.
        """
        found = candidates(self.plan, number, can_run=self._can_run)
        if not found:
            raise HfScaleError(
                f"{self.command.script} can run none of the {len(self.plan.choices)} layouts that fit"
            )
        self.configurations = {candidate.name: candidate for candidate in found}
        # Before hours of measuring, not after them
        for name in (*self.configurations, BEST):
            self._check_unchanged(self.output_dir / name)

    def run(self, steps: int) -> None:
        """Run the configurations.

        Args:
            steps (`int`): optimizer steps to measure in the first round.
        """
        with progress(number_of_runs(len(self.configurations))) as show:

            def run_one(name: str, number: int) -> float | None:
                trial = self.run_one(name, number, show)
                self.results[name] = (trial, number)
                return trial.tokens_per_s

            is_over: Callable[[], bool] = lambda: time.monotonic() >= self.ends  # noqa: E731
            successive_halving(list(self.configurations), steps, run_one, is_over=is_over)

    @property
    def measured(self) -> dict[str, float]:
        """Tokens per second of the configurations that ran."""
        rates = {name: trial.tokens_per_s for name, (trial, _) in self.results.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    @property
    def chosen(self) -> str | None:
        """The configuration that was measured to be the fastest; None if none was measured."""
        return max(self.measured, key=lambda name: self.measured[name], default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints, without the files and the hardware row."""
        return {
            "configurations": [self._row(candidate) for candidate in self.configurations.values()],
            "chosen": self.chosen,
        }

    def write_best(self, name: str) -> list[Path]:
        """Write the launcher's config, the recipe's flags and the launch command of a configuration.

        Args:
            name (`str`): the configuration.

        Returns:
            `list[Path]`: the files.
        """
        return self._write(self.configurations[name], self.output_dir / BEST)

    def _can_run(self, job: "Job") -> bool:
        """Whether the script can run a job, or another recipe of its task can; a user's copy is not replaced."""
        from importlib.util import find_spec

        from hfscale.planner.launchable import uses_deepspeed

        if uses_deepspeed(job) and find_spec("deepspeed") is None:
            return False
        if (job.optimizer, job.pure_bf16) != (self.command.optimizer, False):
            return False  # they change what is learnt, which the command decides
        layout = job.layout
        if not self.command.is_recipe and job.activation_checkpointing == "selective":
            return False  # `--recompute` is a flag of the recipes
        return self._is_shipped or layout.tp * layout.pp * layout.cp * job.expert_parallel == 1

    @property
    def _is_shipped(self) -> bool:
        return self.command.script.resolve().is_relative_to((shipped_root() / "recipes").resolve())

    def _script(self, job: "Job") -> Path:
        from hfscale.planner.launchable import recipe_of

        recipe = recipe_of(job)
        return (
            shipped_root() / recipe
            if self._is_shipped and recipe is not None
            else self.command.script
        )

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        estimate = candidate.choice.estimate
        trial, steps = self.results.get(candidate.name, (None, None))
        reason = "not run: the time or the money was used up" if trial is None else trial.error
        measured = None if trial is None else trial.tokens_per_s
        described = candidate.choice.to_dict()
        layout = (
            "strategy",
            "layout",
            "zero_stage",
            "micro_batch",
            "grad_accum",
            "activation_checkpointing",
            "offload",
        )
        return {
            "name": candidate.name,
            "predicted_tokens_per_s": candidate.predicted_tokens_per_s,
            "measured_tokens_per_s": measured,
            "error": None if measured is None else candidate.predicted_tokens_per_s / measured - 1,
            "reason": reason,
            "predicted_memory_gib": estimate.memory.needed,
            "measured_memory_gib": None if trial is None else trial.memory_gib,
            "steps": steps,
            **{key: described[key] for key in layout},
        }

    def _write(self, candidate: Candidate, folder: Path) -> list[Path]:
        """Write what the launcher and the recipe read."""
        from hfscale.core.launch_file import comment, launch_script, quoted
        from hfscale.core.written_files import LAUNCH_FILE, write_files
        from hfscale.planner.emit import (
            accelerate_yaml,
            deepspeed_config,
            layout_flags,
            offload_ranks,
            task_flags,
        )
        from hfscale.planner.launchable import uses_deepspeed

        choice = candidate.choice
        job = choice.estimate.job
        flags = layout_flags(job)
        if job.task != "text":
            flags |= {key: value for key, value in task_flags(job).items() if key != "packing"}
        elif self.command.is_recipe:
            flags["block_size"] = job.seq_len
        values = self.command.kept_values | flags
        launch = ["accelerate", "launch", *self._launch(folder, job)[3:]]
        about = [quoted(launch), f"{candidate.name} of hfscale tune."]
        above = "".join(f"{comment(line)}\n" for line in about)
        files = {
            "accelerate.yaml": above
            + accelerate_yaml(self.plan, choice, folder).partition("\n")[2],
            "recipe.yaml": above
            + "".join(f"{name}: {_yaml(value)}\n" for name, value in values.items()),
            LAUNCH_FILE: launch_script(
                [_beside(folder, word) for word in launch],
                about=about,
                offload_ranks=offload_ranks(job),
            ),
        }
        if uses_deepspeed(job):
            files["deepspeed.json"] = json.dumps(deepspeed_config(job), indent=2) + "\n"
        if not self.command.is_recipe:
            del files["recipe.yaml"]  # the flags are words of the command
        write_files(folder, files, asked=self._asked, force=self.force)
        return [folder / name for name in files]

    def _check_unchanged(self, folder: Path) -> None:
        """Check that no file of a configuration's folder was changed, unless they are to be replaced."""
        from hfscale.core.written_files import check_unchanged

        if not self.force:
            check_unchanged(folder, dict.fromkeys(EDITABLE_FILES), asked=self._asked)

    @property
    def _asked(self) -> str:
        return spelled("output_dir", str(self.output_dir))

    def _launch(self, folder: Path, job: "Job") -> list[str]:
        """The launch command of a folder that `_write` has filled."""
        from hfscale.planner.launchable import uses_deepspeed

        launcher = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(folder / "accelerate.yaml"),
        ]
        script = str(self._script(job).absolute())
        if self.command.is_recipe:
            return [
                *launcher,
                *self.command.launcher,
                script,
                "--config",
                str(folder / "recipe.yaml"),
            ]
        if job.precision == "fp32" and not uses_deepspeed(job):
            # The config asks for bf16, and the flags of the script do not
            launcher += ["--mixed_precision", "no"]
        return [*launcher, *self.command.launcher, script, *self._words(job)]

    def _words(self, job: "Job") -> list[str]:
        """The flags of a script that is no recipe, with those of a layout."""
        from hfscale.core.versions import is_at_least
        from hfscale.planner.emit import layout_flags

        flags = layout_flags(job)
        if "activation_checkpointing" in flags and not is_at_least("transformers", "5.23"):
            flags["gradient_checkpointing"] = flags.pop("activation_checkpointing")
        words: list[str] = []
        for name, value in (self.command.kept_values | flags).items():
            words.append(f"--{name}")
            if isinstance(value, dict | bool):
                words.append(json.dumps(value))
            elif isinstance(value, list):
                words += map(str, value)
            else:
                words.append(str(value))
        return words

    def run_one(self, name: str, steps: int, show: "Show") -> "Trial":
        """Run a configuration once.

        Args:
            name (`str`): the configuration.
            steps (`int`): optimizer steps to measure.
            show (`Show`): shows the progress.
        """
        import shutil

        from hfscale.report.sweep import environment
        from hfscale.tune.trial import WARM_UP_STEPS, run_trial

        folder = self.output_dir / name
        candidate = self.configurations[name]
        self._check_unchanged(folder)
        with writing(self._asked, "give another folder"):
            shutil.rmtree(folder, ignore_errors=True)
            self._write(candidate, folder)
        flags = {
            "output_dir": str(folder),
            "max_steps": str(steps + WARM_UP_STEPS + 1),  # the run is ended before its last step
            "logging_steps": "1",
            "save_strategy": "no",
            "eval_strategy": "no",
            "report_to": "none",
            "disable_tqdm": "true",
            "resume_from_checkpoint": "false",
        }
        if not self.command.is_recipe:
            del flags["resume_from_checkpoint"]  # a script may take it for a path
        command = self._launch(folder, candidate.choice.estimate.job)
        command += [word for name, value in flags.items() for word in (f"--{name}", value)]
        show.begin(name, steps + WARM_UP_STEPS)
        trial = run_trial(
            command,
            folder,
            steps=steps,
            timeout_s=max(0.0, self.ends - time.monotonic()),
            environment=environment([self.command.processes]),
            on_step=show.step,
        )
        rate = trial.error or f"{trial.tokens_per_s:,.0f} tokens/s"
        show.end(
            f"{name}, {steps} steps: {rate} (predicted {candidate.predicted_tokens_per_s:,.0f})"
        )
        return trial


class Show:
    """Shows the progress of the runs on standard error: a bar on a terminal, and a line as each run ends."""

    def __init__(self, runs: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._runs = self.bar.add_task("runs", total=runs)
        self._steps = self.bar.add_task("steps", total=1)

    def begin(self, name: str, steps: int) -> None:
        """Show that a run begins."""
        self.bar.reset(self._steps, description=name, total=steps)

    def step(self, done: int) -> None:
        """Show the number of steps that the run has done."""
        self.bar.update(self._steps, completed=done)

    def end(self, line: str) -> None:
        """Show the result of the run."""
        self.bar.advance(self._runs)
        if self.bar.disable:
            print(f"hfscale: {line}", file=sys.stderr)
        else:
            self.bar.console.print(line, markup=False)


@contextmanager
def progress(runs: int) -> Iterator[Show]:
    """Show the progress of some runs while the context lasts.

    Args:
        runs (`int`): their number.
    """
    show = Show(runs)
    with show.bar:
        yield show


def _correct(tuning: Tuning, row: Accelerator) -> dict[str, Any]:
    """Correct the hardware row from the measurements, write it into the user's file and describe it."""
    from hfscale.check.calibrate import write_row
    from hfscale.facts.own_hardware import read_hardware_document

    jobs = [
        (tuning.configurations[name].choice.estimate.job, rate)
        for name, rate in tuning.measured.items()
    ]
    name = row.name if row.name.startswith("local-") else f"local-{row.name}"
    found: Correction = correct(
        row,
        jobs,
        name=name,
        source=f"{row.source}; corrected by hfscale tune from {len(jobs)} runs on {date.today()}",
    )
    file = user_hardware_file()
    document = read_hardware_document(file) if file.is_file() else {}
    earlier = [
        one
        for one in document.get("measurement", [])
        if one.get("gpu") == name and one["kind"] != "tune"
    ]
    runs = [
        {
            "kind": "tune",
            "configuration": one.name,
            "model": tuning.plan.model,
            "predicted_tokens_per_s": one.predicted_tokens_per_s,
            "tokens_per_s": tuning.measured[one.name],
        }
        for one in tuning.configurations.values()
        if one.name in tuning.measured
    ]
    write_row(found.gpu, file, [*earlier, *runs])
    return {
        "file": str(file),
        "name": found.gpu.name,
        "rate_factor": found.rate,
        "link_factor": found.link,
        "median_error_before": found.error_before,
        "median_error_after": found.error_after,
        "row": {key: value for key, value in asdict(found.gpu).items() if value is not None},
    }


def _show(answer: dict[str, Any]) -> None:
    from hfscale.core.terminal import make_console, make_table

    console = make_console()
    numbers = ("predicted tokens/s", "measured", "error", "predicted GiB", "measured GiB", "steps")
    table = make_table("configuration", *numbers, "", right=numbers)
    for row in answer["configurations"]:
        measured = row["measured_tokens_per_s"]
        gib = row["measured_memory_gib"]
        table.add_row(
            row["name"],
            f"{row['predicted_tokens_per_s']:,.0f}",
            "" if measured is None else f"{measured:,.0f}",
            "" if measured is None else f"{row['error']:+.0%}",
            f"{row['predicted_memory_gib']:.1f}",
            "" if gib is None else f"{gib:.1f}",
            str(row["steps"] or ""),
            row["reason"] or ("chosen" if row["name"] == answer["chosen"] else ""),
        )
    console.print(table)
    if answer["chosen"] is None:
        console.print("No configuration could be measured.")
        return
    hardware = answer["hardware"]
    console.print(
        f"Chosen: {answer['chosen']}; launch it with: sh {_launch_file(answer)}", markup=False
    )
    console.print(
        f"Corrected: {hardware['name']} in {hardware['file']} (median error of the estimates "
        f"{hardware['median_error_before']:.0%} -> {hardware['median_error_after']:.0%}); plan with it: hfscale plan "
        f"MODEL --gpu {hardware['name']} --gpus N",
        markup=False,
    )


def _launch_file(answer: dict[str, Any]) -> str:
    return next(str(file) for file in answer["files"] if str(file).endswith("launch.sh"))


def _beside(folder: Path, word: str) -> "Word":
    """A word of the launch command, without the folder of the script that contains it."""
    from hfscale.core.launch_file import Beside

    path = Path(word)
    return Beside(path.name) if path.parent == folder and path.name in EDITABLE_FILES else word


def _yaml(value: Any) -> str:
    """A value as YAML: JSON, with the escapes that YAML has."""
    from hfscale.core.launch_file import yaml_text

    return yaml_text(value) if isinstance(value, str) else json.dumps(value)


COMMAND = make_command(
    run,
    TuneOptions,
    function="tune",
    arguments={
        "command": Annotated[
            list[str] | None,
            typer.Argument(
                metavar="-- COMMAND …", help="accelerate launch … train.py …, or torchrun …"
            ),
        ]
    },
)
EXAMPLES = (
    "hfscale tune -- accelerate launch --num_processes 2 recipes/ddp/train.py",
    "hfscale tune --steps 10 --top 5 --deadline 1 -- accelerate launch --num_processes 8 recipes/sharded/train.py "
    "--config recipes/sharded/llama-3.1-8b-full.yaml",
    "hfscale tune --model llama-3.1-8b --seq-len 4096 -- torchrun --nproc-per-node 8 my_train.py --bf16 true",
)
