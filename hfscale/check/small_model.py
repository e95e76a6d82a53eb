"""Makes every transformers model of a process small and its weights random: fewer and narrower layers, same classes.

Only the processes that `hfscale check` starts call this. No weights are read; the vocabulary stays, so that the user's
data fits.
"""

import functools
from typing import Any

from hfscale.trainer.small_model import make_config_small

_ORIGINALS: dict[str, Any] = {}


def make_models_small(module: Any) -> None:
    """Change all models that are made later.

    Args:
        module (`module`): `transformers.modeling_utils`.
    """
    init = module.PreTrainedModel.__init__

    @functools.wraps(init)
    def small(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        make_config_small(config)
        init(self, config, *arguments, **options)

    @classmethod  # type: ignore[misc]
    def from_pretrained(cls: Any, path: Any, *_: Any, config: Any = None, **options: Any) -> Any:
        if config is None:
            names = (
                "revision",
                "cache_dir",
                "token",
                "local_files_only",
                "trust_remote_code",
                "subfolder",
            )
            config = cls.config_class.from_pretrained(
                path, **{k: v for k, v in options.items() if k in names}
            )
        return cls(config)  # not by `_from_config`, which shards it under ZeRO-3

    _ORIGINALS["from_pretrained"] = vars(module.PreTrainedModel)["from_pretrained"].__func__
    module.PreTrainedModel.__init__ = small
    module.PreTrainedModel.from_pretrained = from_pretrained


def read_pretrained(model_class: Any, folder: Any, **options: Any) -> Any:
    """Return a model with the weights of a folder, also in a process whose models are small and random.

    Args:
        model_class (`type`): the class of the model, of transformers.
        folder (`Path`): a folder that `save_pretrained` has written.
        options: keywords of `from_pretrained`.
    """
    original = _ORIGINALS.get("from_pretrained")
    if original is None:
        return model_class.from_pretrained(folder, **options)
    return original(model_class, folder, **options)
