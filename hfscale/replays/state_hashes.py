"""Finds weights and states of the optimizer that change in memory while nothing writes them.

A replay does not see a bit that flips in the memory of a weight, since both computations use it, and no other rank has
the value where it is sharded. But between two updates nothing writes a weight: its bits at the end of one step must be
those before the next update. Each rank hashes what it holds, and compares it with itself:

| when | what happens |
|---|---|
| before the first micro-batch of a launch | hashed |
| after the reports (log, evaluation, save) of the step before one that is replayed | hashed |
| before the first micro-batch of the step that is replayed | compared, before replicas are compared with each other |
| before the update of that step, when all gradients are there | compared again |

So one of N windows from update to update is covered, as one of N computations is. A frozen weight is hashed once and
compared with that hash at each replay, so that a bit that flips at any time is found. With DeepSpeed its own fp32
weights are compared too. Buffers are not compared: a model may write them at any time.

What is written is not blamed. An in-place operation of PyTorch increases the version counter of a tensor, and a new
tensor has another address: both are left out. A write through `.data`, or by a kernel of another library, does
neither; it is told from a fault by what it reaches: all ranks, or several tensors of a single process, or what differs
in the first replay of a launch. Such tensors are named in one line of the log, and not compared any more.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from hfscale.core.bit_hash import named_hashes, named_numbers
from hfscale.core.collectives import TRAINING
from hfscale.core.findings import Finding, name_ranks
from hfscale.core.logging import get_logger
from hfscale.core.torch_internals import version_of
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import kept_of, own_part

logger = get_logger(__name__)
_MAX_NAMED = 3

Identity = tuple[int, int, int, torch.Size, torch.dtype]
"""Address, versions, shape and type: they stay the same as long as nothing writes a tensor or puts another one in its
place. A DTensor and its local tensor have a version each, and count other writes."""


def corruption_errors(
    check: str, ranks: Sequence[int], hosts: Sequence[str], problem: Callable[[int, str], str]
) -> list[Finding]:
    """Return an error for each host on which ranks have a wrong value.

    Args:
        check (`str`): what was checked.
        ranks (`Sequence[int]`): the ranks that have one.
        hosts (`Sequence[str]`): the host of each rank of the run.
        problem (`Callable`): `problem(rank, where)` says what is wrong, from the first rank of a host and the names of
            its ranks, such as `ranks 2, 3`.
    """
    found = []
    for host in dict.fromkeys(hosts[rank] for rank in ranks):
        own = [rank for rank in ranks if hosts[rank] == host]
        fix = f"take {host} out of the run, and resume from an earlier checkpoint"
        text = problem(own[0], name_ranks(own))
        finding = Finding(
            level="error", check=check, problem=text, fix=fix, ranks=tuple(own), host=host
        )
        found.append(finding)
    return found


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What a tensor was."""

    identity: Identity
    hash: torch.Tensor
    """() in int64, on its device."""
    step: int
    """The steps that had been taken."""


class StateHashes:
    """Compares the weights and states of the optimizer that this rank holds with what they were.

    Args:
        trainer (`Trainer`): prepared for training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._known: dict[str, _Known] = {}
        self._excluded: set[str] = set()
        self._has_reported_written = False
        self.compared = 0
        """Tensors that the last comparison has compared on this rank."""

    def remember(self, step: int) -> None:
        """Hash what this rank holds between two updates; what is frozen and not written keeps its first hash.

        Args:
            step (`int`): the steps that have been taken.
        """
        known = {}
        identities = {}
        to_hash = {}
        for name, tensor, identity, is_frozen in self._tensors():
            before = self._known.get(name)
            if is_frozen and before is not None and before.identity == identity:
                known[name] = before
                continue
            identities[name] = identity
            to_hash[name] = tensor
        for name, value in named_hashes(to_hash).items():
            known[name] = _Known(identity=identities[name], hash=value, step=step)
        self._known = known

    def compare(self, step: int, until: str, *, learns: bool) -> list[Finding]:
        """Compare with what has been hashed; every rank must call it, and gets the same result.

        Args:
            step (`int`): the step that is being taken.
            until (`str`): its moment, for the message.
            learns (`bool`): whether what differs is left out from then on, and not reported.

        Returns:
            `list[Finding]`: an error for each host with a rank that holds something else, and nothing has written it.
        """
        wrong = self._differing()
        first = next(iter(wrong), None)
        message = None
        if first is not None:
            since = f"the end of step {self._known[first].step}"
            message = f"{first} changed in memory between {since} and {until} of step {step}"
        answers = TRAINING.gather("state", [len(wrong), message, socket.gethostname()])
        counts, messages, hosts = zip(*answers, strict=True)
        if not any(counts):
            return []
        for name in wrong:
            del self._known[name]  # reported once
        if learns or (all(counts) and (len(counts) > 1 or counts[0] > 1)):
            self._exclude(wrong, next(message for message in messages if message is not None))
            return []
        ranks = [rank for rank, count in enumerate(counts) if count]
        return corruption_errors(
            "state",
            ranks,
            hosts,
            lambda rank, where: f"{messages[rank]} on {where}, and nothing has written it",
        )

    def _exclude(self, names: Sequence[str], example: str) -> None:
        self._excluded.update(names)
        logger.warning(
            "%s without a write that PyTorch counts: a program has probably written it through .data; %d such values "
            "of this rank are not compared any more",
            example,
            len(names),
        )

    def _differing(self) -> list[str]:
        """Return the names of what has another hash and was not written."""
        tensors = {}
        written = []
        for name, tensor, identity, _ in self._tensors():
            known = self._known.get(name)
            if known is None:
                continue
            if known.identity == identity:
                tensors[name] = tensor
            else:
                written.append(name)
        self.compared = len(tensors)
        if written and not self._has_reported_written:
            self._has_reported_written = True
            logger.info(
                "%d of %d weights and states of the optimizer are written between two updates and not compared: %s%s",
                len(written),
                len(written) + len(tensors),
                ", ".join(written[:_MAX_NAMED]),
                " …" if len(written) > _MAX_NAMED else "",
            )
        now = named_numbers(named_hashes(tensors))
        before = named_numbers({name: self._known[name].hash for name in tensors})
        return [name for name, number in now.items() if number != before[name]]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, Identity, bool]]:
        """Yield what this rank holds: its name, its bits, its identity, and whether it is a frozen weight."""
        for name, tensor, is_frozen in self._values():
            # Not of `tensor.detach()`: that of a DTensor has versions of its own
            own = own_part(tensor)
            if (
                own is None
                or name in self._excluded
                or own.is_meta
                or own.is_inference()
                or own.numel() == 0
            ):
                continue
            if own.layout == torch.strided:
                identity = own.data_ptr(), version_of(tensor), version_of(own), own.shape, own.dtype
                yield name, own, identity, is_frozen

    def _values(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        names: dict[Any, str] = {}
        for name, parameter in model_of(self._trainer).named_parameters():
            names[parameter] = name
            yield f"the weight {name}", kept_of(parameter), not parameter.requires_grad
        of_parameters = Strategy.of(self._trainer).torch_optimizer().state
        for number, (stepped, states) in enumerate(of_parameters.items()):
            name = names.get(stepped, f"number {number}")
            if stepped not in names and isinstance(stepped, torch.Tensor):
                yield f"the optimizer's weight {name}", stepped, False
            for key, state in states.items():
                if isinstance(state, torch.Tensor):
                    yield f"the optimizer's {key} of {name}", state, False
