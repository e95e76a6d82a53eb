"""Before the first step of a training: every node and every rank is looked at, and what was found is told."""

import os
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from hfscale.errors import HealthError
from hfscale.health import disk, env, preflight
from hfscale.health.rank_store import RankStore
from hfscale.utils import distributed
from hfscale.utils.findings import Finding, join_errors
from hfscale.utils.logging import get_logger, is_main_process

logger = get_logger(__name__)

PREFLIGHT_DEADLINE_S = 60.0
_SPEED_PROBE_BYTES = 16 * 2**20
_LEVELS = {"note": 20, "warning": 30, "error": 40}
_boards = 0


def connect_board(args: TrainingArguments) -> RankStore | None:
    """The launcher's store; None for a single process, or where no launcher's variables point to one."""
    global _boards
    _boards += 1  # a process may train more than once; all ranks count alike
    if args.world_size == 1:
        return None
    if "MASTER_ADDR" not in os.environ or "RANK" not in os.environ:
        logger.info("no launcher's variables are set: ranks are not checked, and hangs are not watched for")
        return None
    try:
        return RankStore.connect(f"training-{_boards}")
    except HealthError as error:  # a process group can be made without that store; then this rank does without
        logger.error("ranks are not checked and hangs are not watched for: %s", error)
        return None


def check_ranks(trainer: Trainer, rank_store: RankStore | None) -> None:
    """The node, and every rank with every other; without a board the node alone.

    Raises:
        HealthError: a rank is missing, or computes or communicates wrongly.
    """
    args = trainer.args
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    here = env.lint(os.environ, env.Node.here(gpus)) + _disk(trainer) if args.local_process_index == 0 else []
    if rank_store is None:
        tell(here)
        return
    facts = {"node": [finding.to_dict() for finding in here]}
    plan = preflight.Plan(device=args.device, deadline_s=PREFLIGHT_DEADLINE_S, facts=facts)
    found = preflight.run(rank_store, plan)
    # A slow device holds a run up and does no harm: it is told, and the run's own times will show it.
    bad = [finding for finding in found.findings if finding.level == "error" and finding.check != "speed"]
    if bad:
        raise HealthError(f"the ranks are not fit to train: {join_errors(bad)}")
    nodes = [Finding.from_dict(fields) for _, note in sorted(found.ranks.items()) for fields in note["node"]]
    tell([*found.findings, *nodes])


def _disk(trainer: Trainer) -> list[Finding]:
    """Room and time for checkpoints, as large as this model's weights and AdamW states."""
    args = trainer.args
    if args.save_strategy == "no":
        return []
    sizes = [(getattr(p, "ds_numel", p.numel()), p) for p in trainer.model.parameters()]
    weights = sum(numel * p.element_size() for numel, p in sizes)
    states = disk.BYTES_PER_TRAINED_PARAMETER * sum(numel for numel, p in sizes if p.requires_grad)
    speed = disk.write_speed(Path(args.output_dir), _SPEED_PROBE_BYTES)
    return disk.judge(
        Path(args.output_dir), checkpoint_bytes=weights + states, bytes_per_s=speed, notice_s=disk.DEFAULT_NOTICE_S
    )


def tell(findings: list[Finding]) -> None:
    """Each in one line, from the main process; from another what only it knows."""
    for finding in findings:
        is_mine = finding.ranks == (distributed.rank(),) and finding.check == "gpu"
        if is_main_process():
            logger.log(_LEVELS[finding.level], "%s", finding)
        elif is_mine:
            logger.error("%s", finding)
