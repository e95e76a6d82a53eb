"""What a run leaves behind for `hfscale report`: measurements, timeline, ranks; and the ledger of its time."""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from transformers import Trainer, TrainerState, TrainingArguments

from hfscale.integrations.trainer import saved_state
from hfscale.metrics import records
from hfscale.metrics.goodput import GoodputTracker
from hfscale.metrics.spending import Rate
from hfscale.utils.findings import Finding

PREFIXES = ("scaling/", "checkpoint/", "gpu/", "lr_scaling/")
_TRAINER_KEYS = ("loss", "grad_norm", "learning_rate", "epoch")

_process_start_is_taken = False


def launched_at() -> float:
    """When this training was launched, Unix seconds: the start of the process for the first training of a script.

    A second training of one process, or one in a notebook, begins when it begins.
    """
    global _process_start_is_taken
    if _process_start_is_taken or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return time.time()
    _process_start_is_taken = True
    return psutil.Process().create_time()


class RunFiles:
    """Writes the files of `hfscale.metrics.records`, on the main process; the other ranks keep the ledger only."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._ranks: records.RankLines | None = None
        self._workload_is_written = False

    def begin(self, trainer: Trainer, state: TrainerState, facts: Mapping[str, Any]) -> GoodputTracker:
        """Prepare the files, open the ledger and note the launch."""
        goodput_tracker = GoodputTracker(saved_state(state, "goodput"))
        launched, world_size = launched_at(), trainer.args.world_size
        self._workload_is_written = False
        if not state.is_world_process_zero:
            self._folder = self._ranks = None
            goodput_tracker.begin(launched_at=launched, world_size=world_size)
            return goodput_tracker
        self._folder = folder = Path(trainer.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._ranks = records.RankLines(folder)
        last_alive = records.last_sign_of_life(folder)
        records.begin_records(folder, state.global_step)
        events = records.read_events(folder)
        saves = [(e["time"], e["seconds"]) for e in events if e["event"] == "save" and e["step"] == state.global_step]
        goes_on = bool(events) or state.global_step > 0
        self._write(
            "launch",
            state,
            time=launched,
            begun=time.time(),
            max_steps=state.max_steps,
            host=socket.gethostname(),
            pid=os.getpid(),
            previous_alive=last_alive if goes_on else None,
            **{key: facts[key] for key in ("world_size", "strategy") if key in facts},
        )
        goodput_tracker.begin(
            launched_at=launched,
            world_size=world_size,
            last_alive=last_alive if goes_on else None,
            first_launch=events[0]["time"] if events else None,
            save=saves[-1] if saves and state.global_step > 0 else None,
        )
        return goodput_tracker

    def last_step(self, args: TrainingArguments) -> int:
        """The last step that an earlier launch has logged, before `begin` drops what will be done again; 0: none."""
        path = Path(args.output_dir) / records.JSONL_NAME
        return int(max((record["step"] for record in records.read_records(path)), default=0))

    def workload(self, state: TrainerState, facts: Callable[[], Mapping[str, Any]], rate: Rate | None) -> None:
        """Note once what the run does, which `facts` is asked for, and at what price."""
        if self._workload_is_written:
            return
        self._workload_is_written = True
        price = {"usd_per_gpu_hour": rate.usd_per_gpu_hour, "price_source": rate.source} if rate is not None else {}
        self._write("workload", state, **facts(), **price)

    def ranks(self, state: TrainerState, numbers: Mapping[str, Sequence[float]]) -> None:
        """A line of `hfscale_ranks.jsonl`."""
        if self._ranks is not None:
            self._ranks.add(state.global_step, numbers)

    def logged(self, state: TrainerState, logs: Mapping[str, float], *, durable: bool) -> None:
        """A line of `scaling.jsonl`; one that a checkpoint follows must not be missing after it."""
        if self._folder is None:
            return
        kept = {key: value for key, value in logs.items() if key in _TRAINER_KEYS or key.startswith(PREFIXES)}
        line = {"step": state.global_step, "time": time.time(), **kept}
        records.append_record(self._folder / records.JSONL_NAME, line, durable=durable)

    def saved(self, state: TrainerState, *, seconds: float) -> None:
        """A checkpoint has been written."""
        self._write("save", state, seconds=round(seconds, 4))

    def found(self, state: TrainerState, finding: Finding) -> None:
        """The triage has named a cause."""
        self._write("finding", state, **finding.to_cause())

    def ended(self, state: TrainerState, *, split: Mapping[str, float], advice: str | None) -> None:
        """The training has run to its end."""
        extra = {"advice": advice} if advice is not None else {}
        self._write("end", state, seconds={phase: round(s, 3) for phase, s in split.items()}, **extra)

    def _write(self, event: str, state: TrainerState, **fields: Any) -> None:
        if self._folder is None:
            return
        line = {"event": event, "step": state.global_step, "time": time.time(), **fields}
        records.append_record(self._folder / records.TIMELINE_NAME, line)
