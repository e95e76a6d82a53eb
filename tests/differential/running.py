"""Runs programs in child processes: as a whole with plain Trainer and with hfscale, and interrupted."""

import atexit
import contextlib
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TESTS = FOLDER.parent
for path in (TESTS, TESTS / "trainers", FOLDER):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

from program import Interruption, Program  # noqa: E402

LIMIT_S = 90.0
"""Time limit of one launch."""
PRELOADED = (
    "deepspeed",
    "drawing",
    "preloaded",
    "parts",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "bert", "t5", "vit")),
    *(f"trl.trainer.{kind}_trainer" for kind in ("grpo", "rloo", "dpo", "sft")),
    "sentence_transformers",
    "hfscale.scaling",
    "hfscale.checkpoint.remote",
    "hfscale.checkpoint.resume",
    "hfscale.metrics.profiler",
    "hfscale.averaging.callback",
    "hfscale.replays.bad_batches",
    "hfscale.replays.replay",
    "hfscale.checkpoint.load_once",
    "hfscale.lr_scaling.width",
    "hfscale.lr_scaling.growing_batch",
    "fsspec.implementations.local",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.utils.serialization.config",
)
"""What the process that is forked has imported."""
AFTER_FAILURE_S = 20.0
"""How long the processes that are left may take to end by themselves when one has failed."""
OF_NO_INTEREST = ("runtime", "per_second", "flos", "step_time", "entropy_s", "num_tokens")


@dataclass
class Launch:
    """What one process has recorded.

    Args:
        events (`list[dict]`): its events, in order.
        code (`int` or `None`): exit code; None if it had to be ended at the time limit.
        output (`str`): the end of its standard error.
    """

    events: list[dict[str, Any]]
    code: int | None
    output: str = ""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def is_complete(self) -> bool:
        """Whether `train` has returned."""
        return bool(self.of("end"))


@dataclass
class Run:
    """All launches of one run of a program."""

    launches: list[Launch] = field(default_factory=list)

    @property
    def end(self) -> dict[str, Any] | None:
        """The last event, where `train` has returned."""
        return self.launches[-1].of("end")[0] if self.launches and self.launches[-1].is_complete else None


# In the child


class PlannedCrashError(Exception):
    """The end of a launch, as a mistake in a user's program would be."""


def run_child(job: dict[str, Any]) -> None:
    """Train once; write what happens to the file of events."""
    import numpy as np
    import torch
    import transformers
    from drawing import OWN_TRAINERS
    from parts import arguments_of, trainer_of
    from rows import row_ids

    tempfile.tempdir = None  # that of TMPDIR, not of the process that was forked
    program = eval(job["program"], {"Program": Program, "Interruption": Interruption})  # noqa: S307  our own text
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    out = os.open(f"{job['events']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    where = {"step": 0}
    fetched: list[Any] = []
    """Rows that no step has used yet; where a pass ends with a part of a step, the next step has them too."""

    def write(event: str, **values: Any) -> None:
        os.write(out, json.dumps({"event": event, **values}).encode() + b"\n")

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            write("line", text=record.getMessage(), step=where["step"])

    class Recorder(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            where["step"] = state.global_step
            write("begin", step=state.global_step)

        def on_step_begin(self, args, state, control, **kwargs):
            where["step"] = state.global_step

        def on_step_end(self, args, state, control, **kwargs):
            write("rows", step=state.global_step, rows=sorted(fetched, key=str))
            fetched.clear()

        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            write("rates", step=state.global_step + 1, rates=rates)

        def on_log(self, args, state, control, logs=None, **kwargs):
            numbers = {
                name: float(value)
                for name, value in (logs or {}).items()
                if isinstance(value, int | float) and not any(word in name for word in OF_NO_INTEREST)
            }
            write("log", step=state.global_step, numbers=numbers)

    logging.getLogger("hfscale").addHandler(Lines(logging.WARNING))
    try:
        resume = None
        callbacks: list[Any] = [Recorder()]
        if job["hfscale"]:
            callbacks = [*hfscale_callbacks(program, job), *callbacks]
        else:
            # Plain Trainer has neither; so only the interrupted run differs, and what else hfscale does
            callbacks = [*learning_callbacks(program), *callbacks]
        if job["interruption"] is not None and job["interruption"]["rank"] in (None, rank):
            callbacks.append(interrupter(Interruption(**job["interruption"]), job))
        transformers.utils.logging.disable_progress_bar()
        import datasets

        datasets.disable_progress_bars()
        arguments = arguments_of(program, job["folder"], other_batch=job["other_batch"], processes=processes)
        trainer = None
        if program.resume != "latest" or processes > 1:  # without torchrun's store, arguments connect the processes
            trainer = trainer_of(program, arguments, callbacks)
        if job["resumes"]:
            resume = find_checkpoint(job, program)
            if program.resume == "true" and resume is not None and job["remote"] is None and not program.load_once:
                resume = True
        write("resume", path=resume, cpu_s=time.process_time())
        trainer = trainer or trainer_of(program, arguments, callbacks)
        fetch = trainer.get_batch_samples
        numbered = program.trainer in (*OWN_TRAINERS, "Seq2SeqTrainer")

        def record_rows(*args: Any, **kwargs: Any) -> Any:
            batches, count = fetch(*args, **kwargs)
            fetched.extend(each for batch in batches for each in row_ids(batch, numbered=numbered))
            return batches, count

        trainer.get_batch_samples = record_rows
        trainer.train(resume_from_checkpoint=resume)
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        folder = Path(job["folder"])
        tokens = int(trainer.state.num_input_tokens_seen)
        write(
            "end",
            tokens=tokens,
            step=trainer.state.global_step,
            best=trainer.state.best_global_step if program.best != "none" else None,
            checkpoints=sorted(path.name for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()),
            cpu_s=time.process_time(),
            drawn=drawn,
            average=total_of(folder / "average"),
            loaded=total_of(folder / f"checkpoint-{trainer.state.best_global_step}"),
            **weights_of(trainer.model),
        )
    except BaseException as error:
        # Only the kind of a message matters: numbers and paths differ between runs.
        kind = [each.__name__ for each in type(error).__mro__]
        frames = traceback.format_tb(error.__traceback__)
        found = {"type": kind[0], "mro": kind, "message": str(error)[:600], "trace": "".join(frames[-12:])}
        write("raised", **found, step=where["step"])
        raise


def weights_of(model: Any) -> dict[str, Any]:
    """Return a hash of the weights, and a number that differs little where they do."""
    digest, total = hashlib.sha256(), 0.0
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().cpu().float().numpy().tobytes())
        total += float(tensor.detach().double().abs().sum())
    return {"digest": digest.hexdigest()[:16], "total": total}


def total_of(folder: Path) -> float | None:
    """Return a number that differs where the weights in a folder do; None if there are none."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    tensors = [tensor for file in files for _, tensor in sorted(load_file(file).items())]
    return sum(float(tensor.double().abs().sum()) for tensor in tensors) if tensors else None


def learning_callbacks(program: Program) -> list[Any]:
    """Return the callback for a batch that grows, or a rate that follows the width, that the program has."""
    from hfscale import LRScalingCallback

    if program.learning == "growing_batch":
        first = program.batch * program.processes
        grown_at = program.rows * program.epochs // 3
        schedule = f"{first},{2 * first}@{grown_at}samples"
        return [LRScalingCallback(batch_schedule=schedule)]
    if program.learning == "base_width":
        from parts import BASE_WIDTH

        return [LRScalingCallback(base_width=BASE_WIDTH)]
    return []


def hfscale_callbacks(program: Program, job: dict[str, Any]) -> list[Any]:
    """Return the callbacks of hfscale that the program has."""
    from hfscale import ScalingCallback, SpotCheckpointCallback, WeightAveragingCallback
    from hfscale.checkpoint.preemption.stop import PreemptionStop
    from hfscale.health.callback import CommHealthCallback

    PreemptionStop.exchange_every_s = 0.0  # else the step at which a run stops depends on how fast it is
    spot = SpotCheckpointCallback(remote=job["remote"])
    health: dict[str, Any] = {}
    if program.replay:
        health["replay_every_steps"] = program.replay
    if program.skips:
        health["skip_bad_batches"] = 3
    if program.collects:
        health["gc_every_steps"] = program.collects
    averages = {"none": {}, "ema": {"ema_decay": 0.9}, "last": {"average_last": 3, "average_every_steps": 1}}[
        program.average
    ]
    average = [WeightAveragingCallback(**averages)] if averages else []
    learning = learning_callbacks(program)
    if program.callback == "scaling":
        parts: dict[str, Any] = {"spot_checkpoint": spot, "comm_health": CommHealthCallback(**health)}
        if learning:
            parts["lr_scaling"] = learning[0]
        return [ScalingCallback(**parts), *average]
    return [*learning, spot, *([CommHealthCallback(**health)] if health else []), *average]


def find_checkpoint(job: dict[str, Any], program: Program) -> str | None:
    """Return the checkpoint to resume from, as users find it."""
    if job["hfscale"]:
        from hfscale import latest_checkpoint

        copies = str(Path(os.environ["TMPDIR"]) / "copies") if program.load_once else None
        return latest_checkpoint(job["folder"], remote=job["remote"], load_once=copies)
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(job["folder"]) if Path(job["folder"]).is_dir() else None


def interrupter(interruption: Interruption, job: dict[str, Any]) -> Any:
    """Return a callback that ends the launch."""
    import torch
    import transformers

    def strike() -> None:
        if interruption.how == "crash":
            raise PlannedCrashError(interruption.where)
        if interruption.how == "stop_file":
            # hfscale's name of it
            Path(job["folder"], "hfscale_stop").touch()
            return
        number = {"kill": signal.SIGKILL, "notice": signal.SIGTERM, "ctrl_c": signal.SIGINT}[interruption.how]
        os.kill(os.getpid(), number)
        if interruption.how == "kill":
            threading.Event().wait()

    class Interrupter(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.is_over = False

        def is_due(self, state) -> bool:
            due = state.global_step >= max(1, state.max_steps * interruption.percent // 100)
            if due and not self.is_over:
                self.is_over = True
                return True
            return False

        def on_step_begin(self, args, state, control, **kwargs):
            if interruption.where == "step" and self.is_due(state):
                strike()

        def on_prediction_step(self, args, state, control, **kwargs):
            if interruption.where == "evaluation" and self.is_due(state):
                strike()

        def on_save(self, args, state, control, **kwargs):
            if interruption.where == "save" and interruption.how != "kill" and self.is_due(state):
                strike()

        def on_step_end(self, args, state, control, **kwargs):
            if interruption.where == "save" and interruption.how == "kill" and self.is_due(state):
                save = torch.save

                def save_and_strike(*args: Any, **kwargs: Any) -> None:
                    save(*args, **kwargs)
                    strike()

                torch.save = save_and_strike

    return Interrupter()


# In the worker


def recorded(path: str) -> list[dict[str, Any]]:
    """Return the events in a file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


def merged(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the events of a launch: those of rank 0, with the rows, lines and errors of all ranks.

    A step of which a rank did not get its rows, because the launch ended, has no rows.
    """
    if len(ranks) == 1:
        return ranks[0]
    rows: dict[int, list[Any]] = {}
    counts: dict[int, int] = {}
    for event in (event for events in ranks for event in events if event["event"] == "rows"):
        rows.setdefault(event["step"], []).extend(event["rows"])
        counts[event["step"]] = counts.get(event["step"], 0) + 1
    kept = [event for event in ranks[0] if event["event"] != "rows"]
    kept += [
        {"event": "rows", "step": step, "rows": sorted(found, key=str)}
        for step, found in sorted(rows.items())
        if counts[step] == len(ranks)
    ]
    kept += [event for events in ranks[1:] for event in events if event["event"] in ("line", "raised")]
    return kept


class Runner:
    """Runs programs in forks of a process that has imported everything."""

    def __init__(self) -> None:
        from fork_client import ForkServer

        paths = [str(path) for path in (FOLDER, TESTS / "trainers", TESTS)]
        layers = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([layers] if layers else [])])
        os.environ["HFSCALE_TEST_PRELOAD"] = ",".join(PRELOADED)
        os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HFSCALE_CLOUD": "none"}
        self._server = ForkServer()
        self.launches = 0

    def close(self) -> None:
        """End all processes."""
        self._server.close()

    def launch(self, program: Program, folder: Path, job: dict[str, Any], cwd: Path) -> Launch:
        """Run one process of a program to its end."""
        self.launches += 1
        processes = job.pop("processes", program.processes)
        name = folder / f"launch{self.launches}"
        events, err = Path(f"{name}.events"), Path(f"{name}.err")
        defaults = {"program": str(program), "events": str(events), "remote": None, "other_batch": False}
        defaults |= {"hfscale": False, "interruption": None, "resumes": False}
        started = self._server.start(
            "script",
            [str(FOLDER / "running.py"), json.dumps(defaults | job)],
            cwd=cwd,
            env=os.environ | {"TMPDIR": str(folder)},
            out=Path(f"{name}.out"),
            err=err,
            ranks=processes,
        )
        code = self._end_of(started)
        output = err.read_text(errors="replace")[-3000:]
        return Launch(merged([recorded(f"{events}.{rank}") for rank in range(processes)]), code, output)

    def _end_of(self, job: Any) -> int | None:
        """Wait for a launch, and end the processes that are left when one has failed, as torch's agent does."""
        try:
            self._server.wait_for_any(job, LIMIT_S)
            codes = job.codes
            if any(codes):
                # The others may have failed since, because they lost the one that was killed.
                code = -signal.SIGKILL if -signal.SIGKILL in codes else next(code for code in codes if code)
                with contextlib.suppress(TimeoutError):
                    self._server.wait(job, AFTER_FAILURE_S)  # kills them at its limit
                return code
            return max(self._server.wait(job, LIMIT_S), key=abs)
        except TimeoutError:
            return None

    def whole(self, program: Program, folder: Path, *, hfscale: bool) -> Run:
        """Run the program without an interruption."""
        out = folder / ("whole" if hfscale else "plain")
        remote = f"file://{folder / 'remote-whole'}" if hfscale and program.move == "lost" else None
        if remote:
            Path(remote.removeprefix("file://")).mkdir(exist_ok=True)
        return Run([self.launch(program, folder, {"folder": str(out), "hfscale": hfscale, "remote": remote}, folder)])

    def interrupted(self, program: Program, folder: Path, *, hfscale: bool) -> Run:
        """Run the program with its interruptions, in as many launches as it takes."""
        place = folder / ("broken" if hfscale else "broken-plain")
        place.mkdir()
        remote = f"file://{place / 'remote'}" if hfscale and program.move == "lost" else None
        if remote:
            (place / "remote").mkdir()
        out = place / "out"
        run = Run()
        left = list(program.interruptions)
        while len(run.launches) < len(program.interruptions) + 3:
            number = len(run.launches)
            out, name, cwd = moved(program.move, place, out, number)
            interruption = asdict(left.pop(0)) if left else None
            job = {"folder": name, "hfscale": hfscale, "resumes": number > 0, "interruption": interruption}
            job |= {"remote": remote, "other_batch": program.move == "batch" and number % 2 == 1}
            if program.move == "processes" and number % 2 == 1:
                job["processes"] = 3 - program.processes
            run.launches.append(self.launch(program, folder, job, cwd))
            last = run.launches[-1]
            if last.is_complete or last.code is None or is_unplanned(last):
                break
        return run


def is_unplanned(launch: Launch) -> bool:
    """Whether a launch has ended by an error that no interruption explains."""
    if launch.code == -signal.SIGKILL:
        return False
    planned = ("PlannedCrashError", "KeyboardInterrupt")
    raised = launch.of("raised")
    if any(event["type"] in planned for event in raised):
        return False  # what the other ranks raise follows from it
    for event in raised:
        return not ("SystemExit" in event["mro"] and event["message"] == "75")
    return launch.code != 0


def moved(move: str, place: Path, out: Path, number: int) -> tuple[Path, str, Path]:
    """Move the output directory before a launch.

    Returns:
        `tuple`: its place, its name for the program, and the working directory.
    """
    if number == 0:
        return (out, "out", place) if move == "relative" else (out, str(out), place)
    if move == "renamed" and out.exists():
        new = place / f"out{number}"
        out.rename(new)
        return new, str(new), place
    if move == "relative":
        other = place / f"elsewhere{number}"
        other.mkdir(exist_ok=True)
        return out, "../out", other
    if move == "link":
        link = place / f"mount{number}"
        link.symlink_to(place, target_is_directory=True)
        return out, str(link / "out"), place
    if move == "lost":
        shutil.rmtree(out, ignore_errors=True)
    return out, str(out), place


def check(program: Program, runner: Runner, *, phase: str | None = None) -> Any:
    """Run a program in all ways and compare.

    Args:
        program (`Program`): the program.
        runner (`Runner`): what runs it.
        phase (`str`, *optional*): run only what can show a fault of this phase.
    """
    from comparing import Comparison, compare

    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="hfscale-differential-"))
    try:
        plain = runner.whole(program, folder, hfscale=False)
        if plain.end is None:
            raised = [f"{event['type']}: {event['message'][:200]}" for event in plain.launches[0].of("raised")]
            return Comparison(program, "impossible", reason=raised[0] if raised else plain.launches[0].output[-300:])
        whole = runner.whole(program, folder, hfscale=True) if phase != "resumed" else None
        broken = runner.interrupted(program, folder, hfscale=True) if phase != "whole" else None
        result = compare(program, plain, whole, broken)
        crashes = all(each.how == "crash" for each in program.interruptions) and program.move != "lost"
        if result.verdict == "fault" and result.fault.phase == "resumed" and crashes and phase is None:
            again = compare(program, plain, None, runner.interrupted(program, folder, hfscale=False))
            result.plain = "right"
            if again.fault is not None:
                is_same = again.fault.quantity == result.fault.quantity
                result.plain = "the same fault" if is_same else f"{again.fault.quantity}: {again.fault.detail[:200]}"
        result.seconds = time.monotonic() - begin
        return result
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def show(program: Program) -> None:
    """Run one program and print how it compares; the exit code is 1 if there is a fault."""
    runner = Runner()
    try:
        result = check(program, runner)
    finally:
        runner.close()
    print(result.describe())
    sys.exit(result.verdict == "fault")


def run_and_exit(job: dict[str, Any]) -> None:
    """Train once, and end this process as Python would, without the time that it takes to free each object."""
    code = 0
    try:
        run_child(job)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run_and_exit(json.loads(sys.argv[1]))
