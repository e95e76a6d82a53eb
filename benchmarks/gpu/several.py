"""Parts: 8 GPUs of one node, and two nodes. On a CPU the same commands start two processes in tiny shapes."""

import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.gpu import speed
from benchmarks.gpu.part import report
from benchmarks.gpu.recipe_runs import Launch, recipe_script, run_recipe
from benchmarks.gpu.saves import compare_killed
from benchmarks.gpu.settings import NODE_VARIABLE, OFFLINE, ON_GPU, REPOSITORY, TIMES_SLOWER, TINY, work_folder

GPUS = 8
PROCESSES = GPUS
LIMIT_S = 240
if TINY:
    PROCESSES = 2
NODES = 2


def strategy(config: str) -> None:
    """Run a recipe on all GPUs of the node under a strategy.

    Args:
        config (`str`): `ddp`, `fsdp2`, `zero2` or `zero3`.
    """
    speed.strategy("llama-1b", config, PROCESSES)


def tensor_and_pipeline() -> None:
    """Run `recipes/tp_pp` on all GPUs: tensor parallel pairs, two pipeline stages, and data parallel for the rest."""
    sizes = {"tp_size": 2, "pp_size": 2}
    if TINY:
        sizes = {"tp_size": 2, "pp_size": 1}
    flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    launch = Launch(config="tp_pp", tier="tp_pp", processes=PROCESSES)
    done = run_recipe("llama-1b", flags, limit_s=LIMIT_S, launch=launch)
    report(
        shape="llama-1b",
        method="full",
        run=f"recipe, tp_pp.yaml, {PROCESSES} processes",
        sizes=sizes,
        **done.summary(),
        seconds=round(done.seconds, 1),
    )


def interleaved_evaluation() -> None:
    """Train and evaluate with an interleaved pipeline: two stages on each of its ranks."""
    flags = ["--pp_size", "2", "--pipeline_schedule", "Interleaved1F1B", "--virtual_stages", "2"]
    flags += ["--eval_strategy", "steps", "--eval_steps", "2", "--max_steps", "4", "--logging_steps", "1"]
    launch = Launch(config="tp_pp", tier="tp_pp", processes=PROCESSES)
    done = run_recipe("llama-1b", flags, limit_s=LIMIT_S, launch=launch)
    results = json.loads((done.folder / "all_results.json").read_text())
    report(interleaved_pipeline=PROCESSES, eval_loss=results["eval_loss"], **done.summary())


def check() -> None:
    """Run `hfscale check` on all GPUs: ranks, links and collectives."""
    launch = Launch(config="ddp", processes=PROCESSES)
    done = subprocess.run(
        launch.command(["-m", "hfscale", "check"]),
        env=os.environ | OFFLINE,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_S * TIMES_SLOWER,
        check=False,
    )
    report(check=PROCESSES, code=done.returncode, lines=done.stdout.splitlines()[-12:])
    if done.returncode:
        raise RuntimeError(f"hfscale check: {done.stderr.strip()[-300:]}")


def kill_rank() -> None:
    """Kill one rank in its second save under FSDP2, start the run again, and compare its losses."""
    compare_killed(Launch(config="fsdp2", processes=PROCESSES), lambda folder: [last_rank(PROCESSES)])


def last_rank(world: int) -> psutil.Process:
    """Return the process of the last rank, of those that this process has started.

    Args:
        world (`int`): Number of ranks.

    Raises:
        RuntimeError: There is none.
    """
    for process in psutil.Process().children(recursive=True):
        if process.environ().get("RANK") == str(world - 1):
            return process
    raise RuntimeError(f"no process has RANK={world - 1}")


def two_ranks_on_one_gpu() -> None:
    """Run DDP with two ranks on one GPU over gloo, since NCCL takes one rank per GPU."""
    if ON_GPU:
        os.environ |= {"ACCELERATE_TORCH_DEVICE": "cuda:0", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    launch = Launch(config="ddp", tier="ddp", processes=2)
    done = run_recipe("smollm2-135m", ["--ddp_backend", "gloo"], limit_s=LIMIT_S, launch=launch)
    report(ranks_on_one_gpu=2, **done.summary())


def two_nodes(config: str) -> None:
    """Run a recipe on two nodes; on a CPU two launchers of one process each take their places.

    Args:
        config (`str`): `ddp` or `fsdp2`.
    """
    tier = "sharded"
    if config == "ddp":
        tier = "ddp"
    if not TINY:
        rank, address, port = os.environ[NODE_VARIABLE].split(",")
        launch = Launch(
            config=config, tier=tier, processes=NODES * GPUS, options=_node_options(int(rank), address, int(port))
        )
        done = run_recipe("llama-1b", limit_s=LIMIT_S, launch=launch)
        run = f"recipe, {config}.yaml, {NODES} nodes of {GPUS} GPUs"
        report(shape="llama-1b", method="full", run=run, node=rank, **done.summary())
        return
    _two_launchers(config, tier)


def _node_options(rank: int, address: str, port: int) -> tuple[str, ...]:
    """Return the options of `accelerate launch` on one of the nodes."""
    return (
        *("--num_machines", str(NODES)),
        *("--machine_rank", str(rank)),
        *("--main_process_ip", address),
        *("--main_process_port", str(port)),
    )


def _two_launchers(config: str, tier: str) -> None:
    folder = Path(tempfile.mkdtemp(dir=work_folder(), prefix="nodes-"))
    script = recipe_script("llama-1b", [], tier=tier, folder=folder, model=None)
    port = _free_port()
    launchers = []
    begun = time.monotonic()
    for rank in range(NODES):
        launch = Launch(config=config, processes=NODES, options=_node_options(rank, "127.0.0.1", port))
        log = (folder / f"node-{rank}.log").open("w")
        environment = os.environ | OFFLINE
        launchers.append(
            subprocess.Popen(launch.command(script), env=environment, cwd=REPOSITORY, stdout=log, stderr=log)
        )
    codes = [launcher.wait(LIMIT_S * TIMES_SLOWER) for launcher in launchers]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}; the logs are {folder}/node-*.log")
    report(nodes=NODES, config=config, seconds=round(time.monotonic() - begun, 1), codes=codes)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
