"""Strategies by name, for tests of what uses their facts alone."""

from types import SimpleNamespace

from hfscale.facts.strategies import STRATEGIES
from hfscale.trainer.strategies.fsdp2 import Fsdp2
from hfscale.trainer.strategies.native import Native
from hfscale.trainer.strategies.parallel import Parallel
from hfscale.trainer.strategies.replicated import Replicated
from hfscale.trainer.strategies.zero import Zero

KINDS = {"single": Replicated, "ddp": Replicated, "fsdp": Fsdp2, "zero": Zero, "native": Native, "parallel": Parallel}


def named(name):
    """Return the strategy of this name, of a Trainer without a model."""
    facts = STRATEGIES[name]
    state = SimpleNamespace(distributed_type=None)
    trainer = SimpleNamespace(model=None, model_wrapped=None, accelerator=SimpleNamespace(state=state))
    return KINDS[facts.family](trainer, facts)
