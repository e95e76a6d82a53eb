"""Records, at each log, hashes of what a run has read and drawn, so that `hfscale why` can compare two runs.

`hfscale_fingerprints.jsonl` has one line for each log, up to `MAX_LINES`:

    {"step": 20, "from": 10, "time": …, "inputs": "…16 hexadecimal digits…", "labels": "…", "copies": 1, "rng": "…"}

`inputs` and `labels` are sums, modulo 2^64, of one hash for each row that was trained on in the steps after `from`,
over all ranks. They depend neither on the order of the rows, nor on which rank has read which of them, nor on padding
that a mask marks on the right: runs with the same global batches have the same ones on any number of ranks. `copies`
is the number of ranks that see the same row (tensor parallelism); the sums count each row as often. `rng` is a hash of
the random states of all ranks. The first line of a launch also has `weights` at its start: `norm`, `sum`, `elements`.
"""

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hfscale.core.best_effort import best_effort
from hfscale.core.records import WRITING, append_record
from hfscale.core.run_files import FINGERPRINTS_NAME
from hfscale.trainer.batch_digest import MODULUS, BatchDigest, rng_digest
from hfscale.trainer.collector import Columns
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies.tensors import own_part

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState

MAX_LINES = 10_000
"""Lines that one launch writes at most, about 2 MB."""
_DEVICES = ("cpu", "cuda")
"""Devices that have fp64; `meta` has no content."""
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class RunFingerprint:
    """Takes part in the exchange of each log (`LogPart`), and writes the lines on the main process."""

    def __init__(self) -> None:
        self.digest = BatchDigest()
        """What the batches of this rank are added to."""
        self._folder: Path | None = None
        self._weights: torch.Tensor | None = None
        self._lines = 0
        self._from = 0
        self._copies = 1

    def begin(self, trainer: "Trainer", state: "TrainerState", folder: Path) -> None:
        """Prepare the record of a training.

        Args:
            trainer (`Trainer`): prepared for training.
            state (`TrainerState`): its state, of the beginning of the training.
            folder (`Path`): the output directory of the run.
        """
        self.digest = BatchDigest()
        self._folder = folder if state.is_world_process_zero else None
        self._weights = weight_sums(model_of(trainer))
        self._lines = 0
        self._from = state.global_step
        self._copies = trainer.get_tp_size()

    def numbers(
        self, state: "TrainerState", logs: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return this rank's part of the exchange: numbers that a double holds exactly.

        Args:
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.
            seconds (`Mapping[str, float]`): seconds of each phase since the previous log.
        """
        sums = self.digest.take()
        numbers: dict[str, float] = {"rng": float(int(rng_digest(), 16) % 2**48)}
        for name in ("inputs", "labels"):
            numbers[f"{name}_low"] = float(sums.get(name, 0) % 2**32)
            numbers[f"{name}_high"] = float(sums.get(name, 0) >> 32)
            numbers[f"{name}_seen"] = float(name in sums)
        square, total, elements = (
            self._weights.tolist() if self._weights is not None else (0.0, 0.0, 0.0)
        )
        self._weights = None
        return {
            **numbers,
            "weights_square": square,
            "weights_sum": total,
            "weights_elements": elements,
        }

    def keys(
        self, columns: Columns, state: "TrainerState", logs: Mapping[str, float]
    ) -> dict[str, float]:
        """Write the line of the log; there are no metric keys.

        Args:
            columns (`Mapping[str, Sequence[float]]`): the numbers of every rank, by name.
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.
        """
        begun, self._from = self._from, state.global_step
        if self._folder is None or begun == state.global_step or self._lines >= MAX_LINES:
            return {}
        self._lines += 1
        line: dict[str, Any] = {"step": state.global_step, "from": begun, "time": time.time()}
        for name in ("inputs", "labels"):
            if any(columns[f"{name}_seen"]):
                total = sum(int(low) for low in columns[f"{name}_low"])
                total += sum(int(high) for high in columns[f"{name}_high"]) << 32
                line[name] = f"{total % MODULUS:016x}"
        line["copies"] = self._copies
        line["rng"] = hashlib.blake2b(
            repr(list(columns["rng"])).encode(), digest_size=8
        ).hexdigest()
        elements = sum(columns["weights_elements"])
        if elements:
            line["weights"] = {
                "norm": sum(columns["weights_square"]) ** 0.5,
                "sum": sum(columns["weights_sum"]),
                "elements": int(elements),
            }
        with best_effort(WRITING, self._folder / FINGERPRINTS_NAME):
            append_record(self._folder / FINGERPRINTS_NAME, line)
        return {}


def weight_sums(model: torch.nn.Module) -> torch.Tensor | None:
    """Return the sum of the squares, the sum and the number of the elements that this rank holds, in fp64.

    Quantized and other wrapped parameters are left out. Nothing waits for the device.

    Args:
        model (`nn.Module`): the model, of which a rank may hold a part.

    Returns:
        `torch.Tensor` or `None`: (3,); None if this rank holds no ordinary parameters.
    """
    totals: torch.Tensor | None = None
    for parameter in model.parameters():
        local = own_part(parameter)
        if local is None or local.dtype not in _FLOATS or local.device.type not in _DEVICES:
            continue
        if not local.numel():
            continue
        norm = torch.linalg.vector_norm(local, dtype=torch.float64)
        sums = torch.stack(
            [norm * norm, local.sum(dtype=torch.float64), norm.new_tensor(float(local.numel()))]
        )
        totals = sums if totals is None else totals + sums.to(totals.device)
    return totals
