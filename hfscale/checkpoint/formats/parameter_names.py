"""`hfscale_parameters.json`: the names of the parameters that the optimizer's state only numbers.

Trainer's `optimizer.pt` numbers its parameters. To convert the states for another strategy, their names are needed,
and only the run knows them. The file contains

    {"format": 1, "groups": [["model.embed_tokens.weight", …], ["model.norm.weight", …]],
     "aliases": {"lm_head.weight": "model.embed_tokens.weight"}}

with one list for each of the optimizer's groups, in its order, and the second names of tied parameters. It is written
into every checkpoint. For a checkpoint without it, the names are those of the model that its config.json describes,
grouped as Trainer groups them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from hfscale.checkpoint.formats.view import canonical_name, check_names
from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ParameterNames:
    """The content of `hfscale_parameters.json`."""

    groups: list[list[str]]
    """Names of the optimizer's parameters by group, in the optimizer's order."""
    aliases: dict[str, str]
    """Tied parameters: second name -> first name."""

    @classmethod
    def of(cls, model: nn.Module, param_groups: Iterable[Mapping[str, Any]]) -> "ParameterNames":
        """Return the names for a model and the `param_groups` of its optimizer.

        Args:
            model (`nn.Module`): the model.
            param_groups (`Iterable[Mapping[str, Any]]`): the optimizer's groups; `params` of each contains the
                parameters themselves.
        """
        names: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            names[id(parameter)] = canonical_name(name.removeprefix("module."))
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in param_groups]
        return cls(groups=groups, aliases=aliases_of(model))

    def to_json(self) -> str:
        """Return the content of the file."""
        return (
            json.dumps({"format": _FORMAT, "groups": self.groups, "aliases": self.aliases}) + "\n"
        )


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the tied parameters of `model`: second name -> first name."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            aliases[canonical_name(name)] = canonical_name(known)
    return aliases


def parameter_order(model: nn.Module) -> list[str]:
    """Return the names of all parameters of an unsharded `model`, in its order."""
    return [canonical_name(name) for name, _ in model.named_parameters()]


def read_parameter_names(checkpoint: Path) -> ParameterNames:
    """Return the parameter names from the checkpoint's file, or else those of the model in its config.json.

    Raises:
        CheckpointError: the file is broken, or the checkpoint has neither the file nor a config.json of a known model.
    """
    path = checkpoint / PARAMETERS_NAME
    if not path.is_file():
        return _of_the_config(checkpoint)
    try:
        fields = read_json(path)
        if fields["format"] != _FORMAT:
            raise CheckpointError(
                f"{path} has format {fields['format']}, this version of hfscale reads {_FORMAT}"
            )
        names = ParameterNames(
            groups=[[str(name) for name in group] for group in fields["groups"]],
            aliases=dict(fields["aliases"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}") from None
    check_names(name for group in names.groups for name in group)
    check_names([*names.aliases, *names.aliases.values()])
    return names


def _of_the_config(checkpoint: Path) -> ParameterNames:
    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(
            f"{checkpoint} numbers its optimizer states and has neither {PARAMETERS_NAME} nor a config.json to name "
            "them: only checkpoints that were saved with SpotCheckpointCallback can be converted"
        )
    return trained_names(model_of_config(checkpoint))


def trained_names(model: nn.Module) -> ParameterNames:
    """Return the names of the trainable parameters of an unsharded `model`, grouped as in Trainer's optimizer."""
    import transformers

    # Trainer's own rule; it uses only the model.
    decayed = set(transformers.Trainer.get_decay_parameter_names(cast(Any, None), model))
    trained = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    groups = [
        [parameter for name, parameter in trained if (name in decayed) == is_decayed]
        for is_decayed in (1, 0)
    ]
    return ParameterNames.of(model, [{"params": group} for group in groups])


def model_of_config(checkpoint: Path) -> nn.Module:
    """Build the model that the config.json of `checkpoint` describes, on the meta device, without its weights.

    The file is not trusted: only a model class of transformers itself is called, and no code of the checkpoint or of
    the hub, such as an attention kernel, is loaded.

    Raises:
        CheckpointError: there is no config.json, or transformers cannot build a model from it.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint, local_files_only=True, trust_remote_code=False, attn_implementation="eager"
        )
        model_class = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            if isinstance(model_class, type) and issubclass(
                model_class, transformers.PreTrainedModel
            ):
                model: Any = model_class(config)
            else:
                auto_class: Any = transformers.AutoModelForCausalLM
                model = auto_class.from_config(config, trust_remote_code=False)
        model.tie_weights()
    except Exception as error:  # a broken config raises exceptions of any type
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{checkpoint} has no config.json from which transformers can build the model: {reason}"
        ) from None
    return cast(nn.Module, model)
