"""How a training is distributed: one class for each strategy, and what is requested before there is a model.

| module | contents |
|---|---|
| `strategy.py` | `Strategy`: what every strategy answers, and `Strategy.of(trainer)` |
| `replicated.py` | one process, and DDP |
| `fsdp2.py` | FSDP2 by Accelerate |
| `zero.py` | ZeRO by DeepSpeed |
| `native.py` | what transformers distributes while it loads a model |
| `parallel.py` | `ParallelTrainer`, whose class is in `hfscale.parallel` |
| `requested.py` | what the launcher and the arguments request |
| `description.py` | a run as the table of what works with what knows it, for recipes and scripts alike |
| `tensors.py` | what a rank holds of a tensor |

`hfscale/facts/strategies.py` says what the name of a strategy tells without a model.
"""

from hfscale.trainer.strategies.fsdp2 import Fsdp2
from hfscale.trainer.strategies.native import Native
from hfscale.trainer.strategies.parallel import Parallel
from hfscale.trainer.strategies.replicated import Replicated
from hfscale.trainer.strategies.strategy import Strategy
from hfscale.trainer.strategies.zero import Zero

# What a script does itself comes first, since Accelerate does not know of it; whatever is left is replicated.
Strategy.kinds[:] = [Parallel, Native, Zero, Fsdp2, Replicated]

__all__ = ["Strategy"]
