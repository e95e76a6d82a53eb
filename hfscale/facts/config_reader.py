"""Reads a transformers `config.json`, with one name for each key and checked types."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfscale.core.text_files import read_json
from hfscale.errors import ConfigFileError, UnsupportedModelError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "top_k_experts"),
}
"""The name of a key here -> its names in the configs of the model families."""

_BLOCK_TYPES: Mapping[str, str] = {
    "M": "linear_attention",
    "*": "full_attention",
    "E": "moe",
    "-": "mlp",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
"""Names of the layers of Nemotron-H in `hybrid_override_pattern` and in older configs -> in transformers 5.23."""
_BLOCKS_BY_DEFAULT = ("linear_attention", "moe", "full_attention", "mlp")

MAX_VALUE = 10**9
"""Largest value that is not taken for a typing mistake."""
MAX_LAYERS = 1000
"""Largest number of layers that is not taken for a typing mistake; the deepest published model has 1,000 layers
(DeepNet, arXiv 2203.00555)."""

TEXT_MODELS: Mapping[str, str | None] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "idefics3": None,
    "llava": None,
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "smolvlm": None,
}
"""Image-and-text models whose `text_config` is an ordinary language model -> the family of that language model; None
where the `text_config` names it."""
_LLAMA_7B: Mapping[str, int] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
"""Defaults of `LlamaConfig`, which the published `text_config` of LLaVA 1.5 7B leaves out."""
_TIED = ("gemma3", "gemma4")
"""Those of them whose head is tied unless their config says otherwise."""


def load_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Load the config of the language model in `source`.

    If it is an image-and-text model in `TEXT_MODELS`, only the language model's config is returned, without the vision
    tower and its projector, which process images and not tokens.

    Args:
        source (`Mapping`, `str` or `Path`): the parsed `config.json`, its path, or its folder.

    Raises:
        ConfigFileError: there is no such file, it is not JSON, or it has no `model_type`.
        UnsupportedModelError: the model contains a language model in an unknown way.
    """
    config = read_config(source)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigFileError(
            "the model config has no model_type: pass the config.json that save_pretrained writes"
        )
    if model_type == "nemotron_h":
        return _with_block_types(config)
    if "text_config" not in config:
        return config
    text = config["text_config"]
    if model_type not in TEXT_MODELS or not isinstance(text, Mapping):
        raise UnsupportedModelError(
            f"model_type {model_type!r} has its language model in text_config: save the text_config as a separate "
            "config.json and pass that instead; the memory of the vision tower is to be added (docs/trl_recipes.md)"
        )
    # The head belongs to the outer model, so the outer key determines whether it is tied.
    tied = config.get("tie_word_embeddings", model_type in _TIED)
    family = TEXT_MODELS[model_type] or text.get("model_type", "llama")
    defaults = _LLAMA_7B if TEXT_MODELS[model_type] is None and family == "llama" else {}
    return {**defaults, **text, "model_type": family, "tie_word_embeddings": tied}


def read_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Read a complete `config.json`.

    Args:
        source (`Mapping`, `str` or `Path`): the parsed `config.json`, its path, or its folder.

    Raises:
        ConfigFileError: there is no such file, or it is no JSON object.
    """
    return dict(source) if isinstance(source, Mapping) else _parse(Path(source))


def _with_block_types(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of Nemotron-H with `layers_block_type` and the number of its layers, whatever names it has for
    them: published ones have a pattern of letters."""
    types = (
        config.get("layers_block_type")
        or config.get("hybrid_override_pattern")
        or _BLOCKS_BY_DEFAULT
    )
    blocks = [_BLOCK_TYPES.get(kind, kind) for kind in types]
    return {**config, "layers_block_type": blocks, "num_hidden_layers": len(blocks)}


def _parse(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise ConfigFileError(
            f"no model config at {path}: pass a config.json or its folder"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigFileError(
            f"{path} cannot be read as a model config ({error}): replace it"
        ) from error
    if not isinstance(config, dict):
        raise ConfigFileError(
            f"{path} is not a JSON object: pass the config.json that save_pretrained writes"
        )
    return config


class ModelConfig:
    """Reads a model's config by key, and checks the type of each value.

    A missing key has the default of its model's class, as in transformers; a key that is `null` is None. Every error
    gives the model type, the key and how to fix it.

    Args:
        values (`Mapping`): the result of `load_config`.
        defaults (`Mapping`): defaults of the model's class for missing keys.
    """

    def __init__(self, values: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> None:
        self.model_type: str = values["model_type"]
        self._values = values
        self._defaults = defaults

    def get(self, key: str) -> Any:
        """Return the raw value of `key` under any of its `ALIASES`; if it is missing, its default or None."""
        for name in ALIASES.get(key, (key,)):
            if name in self._values:
                return self._values[name]
        return self._defaults.get(key)

    def optional_count(self, key: str) -> int | None:
        """Read an integer of at least 0; return None if the key is missing or `null`.

        Raises:
            UnsupportedModelError: the value is something else, or too large to be correct.
        """
        value = self.get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 0
        ):
            raise self._error(key, f"is {value!r}", "an integer of at least 0")
        largest = MAX_LAYERS if key == "num_hidden_layers" else MAX_VALUE
        if value is not None and value > largest:
            raise self._error(key, f"is {value}", f"an integer up to {largest:,}")
        return value

    def count(self, key: str) -> int:
        """Read an integer of at least 1.

        Raises:
            UnsupportedModelError: the key is missing, or its value is something else or too large to be correct.
        """
        value = self.optional_count(key)
        if not value:
            state = "is missing" if value is None else "is 0"
            raise self._error(key, state, "an integer of at least 1")
        return value

    def flag(self, key: str) -> bool:
        """Read a boolean.

        Raises:
            UnsupportedModelError: the key is missing and has no default, or its value is something else.
        """
        value = self.get(key)
        if not isinstance(value, bool):
            raise self._error(
                key, "is missing" if value is None else f"is {value!r}", "true or false"
            )
        return value

    def items(self, key: str) -> list[Any] | None:
        """Read a list; return None if the key is missing or `null`.

        Raises:
            UnsupportedModelError: the value is something else.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self._error(key, f"is {value!r}", "a list")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """Read a table; return an empty one if the key is missing or `null`.

        Raises:
            UnsupportedModelError: the value is something else.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._error(key, f"is {value!r}", "a table")
        return value or {}

    def _error(self, key: str, state: str, wanted: str) -> UnsupportedModelError:
        names = " or ".join(ALIASES.get(key, (key,)))
        return UnsupportedModelError(
            f"config of model_type {self.model_type!r}: {key} {state}; set {names} to {wanted} in config.json"
        )
