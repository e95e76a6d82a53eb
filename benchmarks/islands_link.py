"""Trains two islands, one of which has a line of 10 Mbit/s, and measures bytes and waiting.

`python -m benchmarks.islands_link --island 0 --rendezvous 127.0.0.1:29600 --bits 4` is one island.
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

from benchmarks.islands_quality import make_model, read_rows
from benchmarks.launched import REPOSITORY, send_result
from benchmarks.slow_link import SlowLink
from hfscale import DiLoCoCallback
from hfscale.facts.compression import Compression
from hfscale.islands.wire import TOKEN_VARIABLE

LINK_BIT_S = 10e6
INNER_STEPS = 100
ROUNDS = 3
ROWS = 16
_PREFIX = "result: "  # of `send_result`


class _Rows(Dataset[dict[str, Any]]):
    def __init__(self) -> None:
        self._rows = read_rows("train")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index].long()
        return {"input_ids": row, "labels": row}


def link(bits: int) -> dict[str, Any]:
    """Trains two islands, of which number 1 reaches the rendezvous through a link of 10 Mbit/s.

    Args:
        bits (`int`): bits per value of the exchange.

    Returns:
        `dict`: what island 1 has measured, the bytes that the link has passed, and what DDP would send.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with SlowLink(address, LINK_BIT_S / 8) as line:
        islands = [_start(number, port, bits) for number, port in enumerate((address[1], line.port))]
        outputs = [island.communicate(timeout=1500)[0] for island in islands]
        if any(island.returncode for island in islands):
            raise RuntimeError(f"an island has failed: {outputs}")
        passed = line.bytes_up
    found = [
        json.loads(next(text for text in output.splitlines() if text.startswith(_PREFIX)).removeprefix(_PREFIX))
        for output in outputs
    ]
    slow = found[1]
    # An all-reduce in a ring of two sends 2 * (2 - 1) / 2 of the fp32 gradients per rank and step (computed).
    ddp = 4 * slow["parameters"] / slow["tokens_per_step"]
    return {
        **{name: value for name, value in slow.items() if name != "digest"},
        "bits": bits,
        "link_mbit_s": LINK_BIT_S / 1e6,
        "link_bytes_up": passed,
        "bytes_per_token": passed / slow["tokens"],
        "ddp_bytes_per_token_computed": ddp,
        "times_fewer_than_ddp": ddp * slow["tokens"] / passed,
        "ddp_step_on_the_link_s_computed": 4 * slow["parameters"] / (LINK_BIT_S / 8),
        "equal_parameters": found[0]["digest"] == slow["digest"],
    }


def _start(number: int, port: int, bits: int) -> "subprocess.Popen[str]":
    arguments = ["--island", str(number), "--rendezvous", f"127.0.0.1:{port}", "--bits", str(bits)]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.islands_link", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, TOKEN_VARIABLE: "benchmark", "OMP_NUM_THREADS": "1"},
    )


def main() -> None:
    """Train as one island, and print what it has measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--island", type=int)
    parser.add_argument("--rendezvous")
    parser.add_argument("--bits", type=int)
    asked = parser.parse_args()
    callback = DiLoCoCallback(
        islands=2,
        island_rank=asked.island,
        rendezvous=asked.rendezvous,
        every_steps=INNER_STEPS,
        compression=Compression(bits=asked.bits),
    )
    set_seed(0)
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=ROUNDS * INNER_STEPS,
            per_device_train_batch_size=ROWS,
            learning_rate=1e-3,
            logging_steps=INNER_STEPS,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=args, train_dataset=_Rows(), callbacks=[callback])
        seconds = trainer.train().metrics["train_runtime"]
    logs = [row for row in trainer.state.log_history if "islands/round_s" in row]
    row_tokens = len(trainer.train_dataset[0]["input_ids"])
    waited = sum(row["islands/round_s"] for row in logs)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    send_result(
        {
            "parameters": weights.numel(),
            "tokens_per_step": ROWS * row_tokens,
            "tokens": ROUNDS * INNER_STEPS * ROWS * row_tokens,
            "rounds": len(logs),
            "round_s": [row["islands/round_s"] for row in logs],
            "logged_bytes": sum(row["islands/bytes"] for row in logs),
            "drift": [row["islands/drift"] for row in logs],
            "train_s": seconds,
            "stall_fraction": waited / seconds,
            "digest": hashlib.blake2b(weights.numpy().tobytes()).hexdigest(),
        }
    )


if __name__ == "__main__":
    main()
