"""Imports everything once, then forks trainings that get signals.

It connects to the socket whose path it is given, reads trials from it, one JSON object per line, and answers with the
outcome of each as a line. Each rank is a process group of its own, as under a launcher. A trial names the moment
(`phase`, `at`, `rank`) at which the signals are sent; the rank that reaches it reports it through a pipe. At the
moment `blocks`, a list of phase, number and rank, that rank stops in a call of C that does not return.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch
from ports import free_port
from replay_runs import Flip, FlipsBit
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from workers.blocked import block_in_c
from workers.shifted_clock import real_time

from hfscale import CommHealthCallback, ParallelArguments, ParallelTrainer, ScalingCallback, SpotCheckpointCallback
from hfscale.checkpoint.loading import readable_checkpoint
from hfscale.recipe.entrypoint import end_if_preempted, run
from hfscale.recipe.layout import finish_on_cpu, set_up_parallelism
from hfscale.recipe.resume import keep_global_batch, resume_point


class Phases:
    """Reports to the server when the moment of the trial is reached, and pauses in each phase.

    After the report it waits for the end of `sent`, when the server has sent the signals that are due at once.
    """

    def __init__(self, spec, rank, reached, sent):
        self.spec = spec
        self.rank = rank
        self.reached = reached
        self.sent = sent
        self.counts = {}

    def enter(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1
        moment = [self.spec.get("phase"), self.spec.get("at", 1), self.spec.get("rank", 0)]
        if [name, self.counts[name], self.rank] == moment:
            os.write(self.reached, b"!")
            os.read(self.sent, 1)
        if [name, self.counts[name], self.rank] == self.spec.get("blocks"):
            block_in_c()
        time.sleep(self.spec.get("pauses", {}).get(name, 0.0))


class PhaseCallback(TrainerCallback):
    """Enters a phase at each event of the Trainer."""

    def __init__(self, phases):
        self.phases = phases

    def on_train_begin(self, *args, **kwargs):
        self.phases.enter("begin")

    def on_epoch_begin(self, *args, **kwargs):
        self.phases.enter("epoch")

    def on_step_begin(self, *args, **kwargs):
        self.phases.enter("step")

    def on_substep_end(self, *args, **kwargs):
        self.phases.enter("substep")

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.phases.enter("optimizer")

    def on_prediction_step(self, *args, **kwargs):
        self.phases.enter("evaluation")


class Trace(TrainerCallback):
    """Appends to a file, a line each: the step after which a launch begins, the complete steps, and losses."""

    def __init__(self, rank):
        self.file = os.open(f"trace-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *values):
        os.write(self.file, f"{json.dumps([real_time(), *values])}\n".encode())

    def on_train_begin(self, args, state, control, **kwargs):
        self.write("begin", state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.write("done", state.global_step)

    def on_prediction_step(self, args, state, control, **kwargs):
        self.write("evaluating", state.global_step)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.write("loss", state.global_step, logs["loss"])


class Tokens(RandomTokens):
    """Enters a phase for each item; each worker process counts its own items."""

    def __init__(self, phases, name, size):
        super().__init__(size)
        self.phases, self.name = phases, name

    def __getitem__(self, index):
        self.phases.enter(self.name)
        return super().__getitem__(index)


class SavingTrainer(Trainer):
    """Enters a phase at the beginning of a save."""

    def _save_checkpoint(self, model, trial):
        self.phases.enter("save")
        super()._save_checkpoint(model, trial)


def make_model(spec):
    """The model of a trial: a small Llama, or the mixture of experts in `moe`, distributed by transformers."""
    if "native" not in spec:
        return tiny_model(**{"attention_dropout": 0.1} | spec.get("model", {}))
    from transformers.distributed import DistributedConfig

    sizes = DistributedConfig(**spec["native"])
    return AutoModelForCausalLM.from_pretrained(spec["moe"], dtype=torch.float32, distributed_config=sizes)


def train(spec, phases):
    arguments = tiny_arguments("out", **spec["arguments"])
    parallel = ParallelArguments(**(spec.get("parallel") or {}))
    trainer_class, more = SavingTrainer, {}
    if spec.get("parallel"):
        trainer_class, more = ParallelTrainer, {"parallel": parallel}
    else:
        set_up_parallelism(parallel, arguments)
    remote = spec.get("spot", {}).get("remote")
    checkpoint = resume_point(arguments, remote) if arguments.resume_from_checkpoint else None
    if spec.get("keeps_batch"):
        keep_global_batch(arguments, checkpoint)
        checkpoint = readable_checkpoint(arguments, checkpoint)
    health = CommHealthCallback(hang_after_s=spec["hang_after_s"]) if "hang_after_s" in spec else None
    flips = []
    if "replay_every" in spec:
        health = CommHealthCallback(replay_every_steps=spec["replay_every"])
        if os.environ["HFSCALE_RUN_RESTARTS"] == "0" and spec["flip"] is not None:
            flips = [FlipsBit(Flip(**spec["flip"]))]
    scaling = ScalingCallback(
        comm_health=health,
        spot_checkpoint=SpotCheckpointCallback(**({"on_preemption": "return"} | spec.get("spot", {}))),
    )
    trainer = trainer_class(
        model=make_model(spec),
        args=arguments,
        train_dataset=Tokens(phases, "data", 64),
        eval_dataset=Tokens(phases, "eval_data", 32),
        callbacks=[] if spec.get("stock") else [PhaseCallback(phases), scaling, *flips],
        **more,
    )
    if spec.get("stock"):
        trainer.add_callback(PhaseCallback(phases))
    trainer.phases = phases
    finish_on_cpu(trainer)
    if spec.get("trace"):
        trainer.add_callback(Trace(phases.rank))
    if "write_s" in spec:

        class SetTime(TrainerCallback):
            def on_epoch_begin(self, *args, **kwargs):
                scaling.spot_checkpoint.preemption.last_write_s = spec["write_s"]

        trainer.add_callback(SetTime())
    trainer.train(resume_from_checkpoint=checkpoint)
    weights = [float(p.detach().double().sum()) for p in trainer.model.parameters()] if spec.get("weights") else []
    outcome = {
        "step": trainer.state.global_step,
        "preempted": None if spec.get("stock") else scaling.spot_checkpoint.preempted,
        "weights": weights,
    }
    Path(f"rank-{phases.rank}.json").write_text(json.dumps(outcome))
    end_if_preempted(scaling)


def become_rank(spec, rank, port, reached, sent):
    """Train in this process and end it."""
    os.setsid()
    os.chdir(spec["folder"])
    log = os.open(f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    world = str(spec.get("world", 2))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank - spec.get("first_rank", 0)),
        WORLD_SIZE=world,
        LOCAL_WORLD_SIZE=str(spec.get("local_world", world)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **spec.get("env", {}),
    )
    code = 1
    try:
        run(lambda: train(spec, Phases(spec, rank, reached, sent)))
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def send(signals, pids, since_s=0.0):
    """Send the signals that are due, and remove them from the list."""
    for entry in list(signals):
        number = signal.Signals[entry["signal"]]
        if since_s < entry.get("after_s", 0.0):
            continue
        signals.remove(entry)
        for rank in entry["to"]:
            with suppress(ProcessLookupError):  # "group": like a launcher, else to the process only
                (os.killpg if entry.get("group") else os.kill)(pids[rank], number)


def trial(spec):
    """Fork the ranks, send the signals at the moment of the trial, and wait until all ranks have ended."""
    port = free_port()
    reader, writer = os.pipe()
    sent_reader, sent_writer = os.pipe()
    pids = []
    for rank in range(spec.get("world", 2)):
        pid = os.fork()
        if pid == 0:
            os.close(sent_writer)
            become_rank(spec, rank, port, writer, sent_reader)
        pids.append(pid)
    os.close(writer)
    os.close(sent_reader)
    begun, codes, signals, sent_at, ended_at = time.monotonic(), {}, list(spec.get("signals", [])), None, None
    while len(codes) < len(pids) and time.monotonic() - begun < spec.get("timeout_s", 240):
        if sent_at is None and select.select([reader], [], [], 0.005)[0] and os.read(reader, 1):
            sent_at = time.monotonic()
            send(signals, pids)
            os.close(sent_writer)
        elif sent_at is not None or not signals:
            time.sleep(0.005)
        if sent_at is not None and signals:
            send(signals, pids, time.monotonic() - sent_at)
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank], ended_at = os.waitstatus_to_exitcode(status), time.monotonic()
                    if codes[rank] != 0 and not spec.get("stock"):  # like a launcher, end the other ranks
                        others = [other for other in range(len(pids)) if other not in codes]
                        send([{"to": others, "signal": "SIGTERM", "group": True}], pids)
    hung = [rank for rank in range(len(pids)) if rank not in codes]
    for rank in hung:
        os.killpg(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    os.close(reader)
    if sent_at is None:
        os.close(sent_writer)
    ranks = [json.loads(path.read_text()) for path in sorted(Path(spec["folder"]).glob("rank-*.json"))]
    return {
        "codes": [codes.get(rank) for rank in range(len(pids))],
        "hung": hung,
        "ranks": ranks,
        "seconds_to_end": ended_at - sent_at if sent_at and ended_at else None,
        "seconds": time.monotonic() - begun,
    }


if __name__ == "__main__":
    import deepspeed  # noqa: F401  accelerate imports it where it is installed

    torch.set_num_threads(1)
    gc.freeze()  # so that garbage collection in the forks does not touch what was imported
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    with connection.makefile("rw") as stream:
        for line in stream:
            stream.write(f"{json.dumps(trial(json.loads(line)))}\n")
            stream.flush()
