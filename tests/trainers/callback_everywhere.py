"""A plugin of pytest that adds `ScalingCallback` to every Trainer which a test makes (test_transformers_own.py)."""

import inspect
from functools import wraps

from transformers import Trainer

from hfscale import ScalingCallback

_plain = Trainer.__init__


@wraps(_plain)
def _with_callback(*args, **kwargs):
    bound = inspect.signature(_plain).bind(*args, **kwargs)
    bound.arguments["callbacks"] = [*(bound.arguments.get("callbacks") or []), ScalingCallback()]
    _plain(*bound.args, **bound.kwargs)


Trainer.__init__ = _with_callback
