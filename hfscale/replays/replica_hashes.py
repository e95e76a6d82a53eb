"""Compares what must be equal on several ranks, bit by bit: weights, and the state of their optimizer.

A weight or a state of the optimizer that an update has made wrong is not seen by a replay, because both computations
use it, and not by `state_hashes`, because it has been written. Where another rank holds the same, it is seen here.

| layout | what is compared |
|---|---|
| DDP | all weights and states |
| HSDP | the shards of the replicas, and their states |
| tensor parallelism | what is not split: norms, routers, and their states |
| ZeRO-1, ZeRO-2 | all weights; the states are sharded |
| FSDP2, ZeRO-3 | nothing: each rank holds other shards |
"""

import socket
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hfscale.core.bit_hash import named_hashes, named_numbers
from hfscale.core.collectives import TRAINING
from hfscale.core.distributed import is_distributed
from hfscale.core.findings import Finding
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import is_distributed_tensor, place_of

_SEPARATOR = "\t"


class ReplicaHashes:
    """Compares the weights and states of the optimizer that several ranks must hold alike.

    Args:
        trainer (`Trainer`): prepared for training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._strategy = Strategy.of(trainer)

    def compare(self, step: int) -> list[Finding]:
        """Compare all ranks between two steps; every rank must call it, and gets the same result.

        Args:
            step (`int`): the step that comes next.

        Returns:
            `list[Finding]`: an error for each rank that differs from most others that hold the same; one without a
                host where there is no majority.
        """
        if not is_distributed() or not self._strategy.replicas:
            return []
        hashes = self._hashes()
        of_ranks = TRAINING.gather("replicas", [_sums(hashes), socket.gethostname()])
        if next(_differing([own for own, _ in of_ranks]), None) is None:
            return []
        named: list[dict[str, int]] = TRAINING.gather("replicas: names", hashes)
        hosts = [host for _, host in of_ranks]
        key, ranks, is_tied = next(_differing(named))
        name, what, _ = key.split(_SEPARATOR)
        problem = f"{what} of {name} is not the same before step {step}"
        if is_tied:
            text = f"{problem} on ranks {', '.join(map(str, ranks))}, and which one is wrong is not known"
            fix = "resume from an earlier checkpoint, and run hfscale check on these nodes"
            return [
                Finding(level="error", check="replicas", problem=text, fix=fix, ranks=tuple(ranks))
            ]
        return [
            Finding(
                level="error",
                check="replicas",
                problem=f"{problem} as on the other ranks that hold it",
                fix=f"take {hosts[rank]} out of the run, and resume from an earlier checkpoint",
                ranks=(rank,),
                host=hosts[rank],
            )
            for rank in ranks
        ]

    def _hashes(self) -> dict[str, int]:
        """Return the hashes by parameter, what of it, and whom this rank has to agree with."""
        return named_numbers(named_hashes(dict(self._tensors())))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # The partitions of ZeRO-1 and 2 are those of no parameter, so that none is found here
        states: Mapping[Any, Any] = {}
        if self._strategy.equal_gradients:
            states = self._strategy.torch_optimizer().state
        for name, parameter in model_of(self._trainer).named_parameters():
            group = _group(parameter)
            if group is None:
                continue
            values: dict[str, torch.Tensor] = {"the weight": parameter}
            for key, state in states.get(parameter, {}).items():
                if isinstance(state, torch.Tensor) and state.shape == parameter.shape:
                    values[f"the optimizer's {key}"] = state
            for what, value in values.items():
                own = self._strategy.own(value)
                if own is not None and own.numel() > 0:
                    yield _SEPARATOR.join((name, what, group)), own


def _sums(hashes: dict[str, int]) -> dict[str, int]:
    """Return one sum for all values that the same ranks hold; ranks of other stages hold other parameters."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key in hashes:
        groups[key.rpartition(_SEPARATOR)[2]].append(key)
    return {
        f"{group} {zlib.crc32(''.join(keys).encode())}": sum(hashes[key] for key in keys) % 2**64
        for group, keys in groups.items()
    }


def _group(parameter: nn.Parameter) -> str | None:
    """Return what the ranks have in common that hold the same values of a parameter; None if there is no other one."""
    if not is_distributed_tensor(parameter):
        return "all"
    place = place_of(parameter)
    if place is None or not place.is_replicated:
        return None
    return f"{list(place.mesh)} {place.axes}"


def _differing(ranks: list[dict[str, int]]) -> Iterator[tuple[str, list[int], bool]]:
    """Yield each key whose values differ, the ranks without the most common one, and whether no value is that."""
    of_key: dict[str, dict[int, int]] = {}
    for rank, own in enumerate(ranks):
        for key, value in own.items():
            of_key.setdefault(key, {})[rank] = value
    for key, values in of_key.items():
        (common, most), *others = Counter(values.values()).most_common()
        if others:
            is_tied = others[0][1] == most
            yield (
                key,
                [rank for rank, value in values.items() if is_tied or value != common],
                is_tied,
            )
