"""Trains islands, all but the first of which have a line of 10 Mbit/s, and measures bytes and waiting.

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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from benchmarks.islands_quality import LAYERS, make_model, read_rows
from benchmarks.launched import REPOSITORY, send_result
from benchmarks.slow_link import SlowLink
from hfscale import DiLoCoCallback
from hfscale.facts.compression import Compression
from hfscale.islands.client import IslandClient, Reply
from hfscale.islands.rendezvous import TOKEN_VARIABLE

LINK_BIT_S = 10e6
INNER_STEPS = 100
ROUNDS = 3
ROWS = 16
_TCP_INFO_BYTES = 256
_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in Linux' struct tcp_info (linux/tcp.h)
_PREFIX = "result: "  # of `send_result`


class _Rows(Dataset[dict[str, Any]]):
    def __init__(self) -> None:
        self._rows = read_rows("train")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index].long()
        return {"input_ids": row, "labels": row}


def link(
    bits: int,
    overlap_steps: int = 0,
    fragments: int = 1,
    *,
    layers: int = LAYERS,
    islands: int = 2,
    ranks: int = 1,
) -> dict[str, Any]:
    """Trains islands, of which all but number 0 reach the rendezvous through a link of 10 Mbit/s of their own.

    Args:
        bits (`int`): bits per value of the exchange.
        overlap_steps (`int`): steps that train while a round exchanges.
        fragments (`int`): parts of the parameters that have rounds in turn.
        layers (`int`): layers of the model.
        islands (`int`): number of islands.
        ranks (`int`): processes of an island, under DDP; they share its batch.

    Returns:
        `dict`: what island 1 has measured, the bytes that its link has passed, and what DDP would send.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    flags = {"bits": bits, "overlap": overlap_steps, "fragments": fragments, "layers": layers, "islands": islands}
    with ExitStack() as stack:
        lines = [stack.enter_context(SlowLink(address, LINK_BIT_S / 8)) for _ in range(1, islands)]
        ports = [address[1], *(line.port for line in lines)]
        started = [_start(number, port, flags, ranks) for number, port in enumerate(ports)]
        outputs = [island[0].communicate(timeout=1500)[0] for island in started]
        if any(rank.wait(60) for island in started for rank in island):
            raise RuntimeError(f"an island has failed: {outputs}")
        passed = lines[0].bytes_up
    found = [
        json.loads(next(text for text in output.splitlines() if text.startswith(_PREFIX)).removeprefix(_PREFIX))
        for output in outputs
    ]
    slow = found[1]
    # An all-reduce in a ring of K sends 2 (K - 1) / K of the fp32 gradients per rank and step (computed). Measured are
    # two ranks, which send them once.
    ring = 2 * (islands - 1) / islands
    ddp = ring * 4 * slow["parameters"] / slow["tokens_per_step"]
    measured = ring * ddp_bytes_per_step(layers) / slow["tokens_per_step"]
    return {
        **{name: value for name, value in slow.items() if name != "digest"},
        "islands": islands,
        "ranks": ranks,
        "bits": bits,
        "overlap_steps": overlap_steps,
        "fragments": fragments,
        "link_mbit_s": LINK_BIT_S / 1e6,
        "link_bytes_up": passed,
        "bytes_per_token": passed / slow["tokens"],
        "ddp_bytes_per_token_computed": ddp,
        "ddp_bytes_per_token_measured": measured,
        "times_fewer_than_ddp": measured * slow["tokens"] / passed,
        "ddp_step_on_the_link_s_computed": ring * 4 * slow["parameters"] / (LINK_BIT_S / 8),
        "equal_parameters": len({one["digest"] for one in found}) == 1,
    }


def ddp_bytes_per_step(layers: int) -> float:
    """Returns the bytes that a rank of two sends per step of DDP over TCP (gloo), headers of gloo included."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.islands_link", "--ddp", "--layers", str(layers)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            env={**env, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank has failed: {outputs}")
    found = next(text for text in outputs[1].splitlines() if text.startswith(_PREFIX))
    return float(json.loads(found.removeprefix(_PREFIX))["bytes_per_step"])


class _CountBytes(TrainerCallback):
    """Counts the bytes that this process sends over TCP in 20 steps."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step in (10, 30):
            dist.barrier()
            self.sent.append(sum(_sent_over_tcp(entry.name) for entry in Path("/proc/self/fd").iterdir()))


def _sent_over_tcp(descriptor: str) -> int:
    """Returns the bytes sent on a descriptor; 0 if it is no TCP connection."""
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return int.from_bytes(info[_BYTES_ACKED : _BYTES_ACKED + 8], sys.byteorder)


def _start(number: int, port: int, flags: dict[str, int], ranks: int) -> list["subprocess.Popen[str]"]:
    """Starts the processes of an island; the first one prints the result."""
    arguments = ["--island", str(number), "--rendezvous", f"127.0.0.1:{port}"]
    for name, value in flags.items():
        arguments += [f"--{name}", str(value)]
    env = {**os.environ, TOKEN_VARIABLE: "benchmark", "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.islands_link", *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            text=True,
            env=env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
        )
        for rank in range(ranks)
    ]


def main() -> None:
    """Train as one island, and print what it has measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--island", type=int)
    parser.add_argument("--rendezvous")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--overlap", type=int, default=0)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--ddp", action="store_true")
    asked = parser.parse_args()
    if asked.ddp:
        counter = _CountBytes()
        _train(counter, asked.layers, steps=30, log_every=1000)
        send_result({"bytes_per_step": (counter.sent[1] - counter.sent[0]) / 20})
        return
    callback = DiLoCoCallback(
        islands=asked.islands,
        island_rank=asked.island,
        rendezvous=asked.rendezvous,
        every_steps=INNER_STEPS,
        overlap_steps=asked.overlap,
        fragments=asked.fragments,
        compression=Compression(bits=asked.bits),
    )
    sent = _count_bytes_of_rounds()
    log_every = INNER_STEPS // max(2, asked.fragments)  # one round in each log at most
    rows = ROWS // int(os.environ.get("WORLD_SIZE", "1"))
    trainer, seconds = _train(callback, asked.layers, steps=ROUNDS * INNER_STEPS, log_every=log_every, rows=rows)
    if trainer.args.process_index > 0:  # the first rank of the island exchanges, and reports
        return
    logs = [row for row in trainer.state.log_history if "islands/drift" in row]
    row_tokens = len(trainer.train_dataset[0]["input_ids"])
    waited = sum(row["islands/round_s"] for row in logs)
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    send_result(
        {
            "parameters": weights.numel(),
            "tokens_per_step": ROWS * row_tokens,
            "tokens": ROUNDS * INNER_STEPS * ROWS * row_tokens,
            "rounds": len(logs),
            "round_s": [row["islands/round_s"] for row in logs],
            "round_bytes": sent,
            "largest_round_bytes": max(sent[:-1]),  # the last one is of all parameters
            "waited_before_the_last_round_s": sum(row["islands/round_s"] for row in logs[:-1]),
            "drift": [row["islands/drift"] for row in logs],
            "train_s": seconds,
            "stall_fraction": waited / seconds,
            "digest": hashlib.blake2b(weights.numpy().tobytes()).hexdigest(),
        }
    )


def _count_bytes_of_rounds() -> list[int]:
    """Returns a list to which each exchange of this process appends the bytes that it has sent."""
    sent: list[int] = []
    exchange = IslandClient.exchange

    def counted(client: IslandClient, *args: Any, **kwargs: Any) -> Reply:
        before = client.sent_bytes
        reply = exchange(client, *args, **kwargs)
        sent.append(client.sent_bytes - before)
        return reply

    IslandClient.exchange = counted  # type: ignore[method-assign]
    return sent


def _train(
    callback: TrainerCallback, layers: int, *, steps: int, log_every: int, rows: int = ROWS
) -> tuple[Trainer, float]:
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=rows,
            learning_rate=1e-3,
            logging_steps=log_every,
            save_strategy="no",
            ddp_find_unused_parameters=False,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=make_model(layers), args=args, train_dataset=_Rows(), callbacks=[callback])
        return trainer, trainer.train().metrics["train_runtime"]


if __name__ == "__main__":
    main()
