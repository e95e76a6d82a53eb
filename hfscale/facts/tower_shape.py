"""The parts of an image-and-text model that read images, from its `config.json`: a vision tower and its projector.

Numbers of parameters are exact: they equal those of `AutoModelForImageTextToText.from_config` in transformers 5.23.
What the parts keep for a backward pass is in `towers.toml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfscale.core.tables import read_table
from hfscale.errors import UnsupportedModelError
from hfscale.facts.config_reader import ModelConfig, read_config

_TABLE: dict[str, dict[str, Any]] = read_table("facts/towers.toml")

FAMILIES: tuple[str, ...] = tuple(_TABLE["families"])
"""Image-and-text models whose tower and projector are counted, transformers' `model_type`."""


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """Describes the tower and the projector of an image-and-text model.

    Create it with `TowerShape.from_config`.
    """

    model_type: str
    """The family of the image-and-text model, as in its `config.json`."""
    kind: str
    """The tower's kind, a name in `layers` of `towers.toml`."""
    layers: int
    """Layers of the tower."""
    used_layers: int
    """Those whose output is used: LLaVA takes the hidden states before its last layer."""
    hidden: int
    """Width of the tower's residual stream."""
    inner: int
    """Inner width of the MLP of its layers."""
    heads: int
    """Heads of its attention."""
    side: int
    """Pixels of a side of an image, as the tower gets it."""
    positions: int
    """Positions of an image in the tower: its patches, and in CLIP one for the class."""
    tokens: int
    """Tokens of an image in the language model."""
    text_hidden: int
    """Width of the language model, into which the projector leads."""
    layer_parameters: int
    """Parameters of a layer of the tower."""
    attention_parameters: int
    """Those of its attention."""
    other_parameters: int
    """Parameters of the tower outside its layers."""
    projector_parameters: int
    """Parameters of the projector."""

    @property
    def tower_parameters(self) -> int:
        """Parameters of the tower."""
        return self.layers * self.layer_parameters + self.other_parameters

    @property
    def total_parameters(self) -> int:
        """Parameters of tower and projector."""
        return self.tower_parameters + self.projector_parameters

    @property
    def pixels(self) -> int:
        """Numbers of an image, in three colours."""
        return 3 * self.side**2

    @property
    def layers_are_units(self) -> bool:
        """Whether a layer of the tower is a unit of FSDP2; in the other families only its attention is."""
        return bool(_TABLE["families"][self.model_type]["layers_are_units"])

    @classmethod
    def from_config(cls, source: Mapping[str, Any] | str | Path) -> "TowerShape":
        """Read the shape of tower and projector.

        Args:
            source (`Mapping`, `str` or `Path`): the parsed `config.json` of the image-and-text model, its path, or its
                folder.

        Raises:
            ConfigFileError: there is no such file, or it is not a model's config.
            UnsupportedModelError: the model reads no images, or its tower or projector is not one of those that were
                counted.
        """
        config = read_config(source)
        family = config.get("model_type")
        vision = config.get("vision_config")
        text = config.get("text_config")
        known_names = ", ".join(FAMILIES)
        if not isinstance(vision, Mapping) or not isinstance(text, Mapping):
            raise UnsupportedModelError(
                f"model_type {family!r} has no vision_config: give an image-and-text model, such as one of "
                f"{known_names}"
            )
        if family not in FAMILIES:
            raise UnsupportedModelError(
                f"the vision tower of model_type {family!r} was not counted: plan for one of {known_names}, or for "
                "its text alone"
            )
        known = _TABLE["families"][family]
        kind = _kind(family, vision, known)
        defaults = _TABLE["layers"][kind]["defaults"]
        outer = ModelConfig({**config, "model_type": family}, defaults=known["defaults"])
        tower = ModelConfig(
            {**vision, "model_type": f"{family}, vision_config"},
            defaults=defaults,
        )
        wide = ModelConfig(
            {**text, "model_type": f"{family}, text_config"},
            defaults={"hidden_size": known["text_hidden"]},
        )
        text_hidden = wide.count("hidden_size")
        return _shape(outer, tower, text_hidden, family, kind)

    def kept_bytes(
        self, regime: str, recompute: str, *, trains_tower: bool, trains_projector: bool
    ) -> float:
        """Compute the bytes of an image that tower and projector keep for their backward pass.

        Args:
            regime (`str`): the formats in which they compute, one of `hfscale.facts.activations`.
            recompute (`str`): `none`, `selective` or `full`.
            trains_tower (`bool`): whether the tower gets gradients.
            trains_projector (`bool`): whether the projector does.
        """
        ends = _TABLE["families"][self.model_type]["ends"][_regime(regime)]
        of_positions = self.positions * self.hidden
        of_tokens = self.tokens * self.text_hidden
        bytes_ = ends["token"] * of_tokens
        bytes_ += ends["pixel"] * self.pixels
        if trains_projector:
            bytes_ += ends["projector"] * of_positions
            bytes_ += ends["projector_token"] * of_tokens
        if trains_tower:
            bytes_ += self.used_layers * self.layer_bytes(regime, recompute)
            bytes_ += ends["tower"] * of_positions
            bytes_ += ends["tower_pixel"] * self.pixels
        return float(bytes_)

    def layer_bytes(self, regime: str, recompute: str) -> float:
        """Compute the bytes of an image that a trained layer of the tower keeps.

        Args:
            regime (`str`): as in `kept_bytes`.
            recompute (`str`): as in `kept_bytes`.
        """
        factors = _TABLE["layers"][self.kind][_regime(regime)][recompute]
        each = factors["position"]
        each += factors["hidden"] * self.hidden
        each += factors["mlp"] * self.inner
        each += factors["heads"] * self.heads
        return float(self.positions * each)

    def forward_bytes(self, regime: str) -> float:
        """Compute the bytes of an image that exist at the peak of a forward pass of a frozen tower.

        Args:
            regime (`str`): as in `kept_bytes`.
        """
        factors = _TABLE["forward"][_regime(regime)]
        each = factors["hidden"] * self.hidden
        each += factors["mlp"] * self.inner
        return float(self.positions * each)

    @property
    def flops(self) -> float:
        """FLOPs of a forward pass of one image: matrix products and attention of the tower, and the projector."""
        of_a_layer = 4 * self.hidden**2
        of_a_layer += 2 * self.hidden * self.inner
        matrices = self.layers * self.positions * of_a_layer
        attention = self.layers * 2 * self.positions**2 * self.hidden
        projected = self.tokens * self.projector_parameters
        return 2.0 * (matrices + attention + projected)


def _regime(name: str) -> str:
    """The regime's name in the table: weights in bf16 keep the same with autocast as without."""
    if name in ("fp32", "autocast"):
        return name
    return "bf16"


def _kind(family: str, vision: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return the kind of a tower, by its `model_type` and its activation function.

    Raises:
        UnsupportedModelError: it was not counted.
    """
    model_type = vision.get("model_type", known["tower"])
    kinds = _TABLE["layers"]
    kind = next((name for name, row in kinds.items() if model_type in row["types"]), None)
    if kind is None:
        raise UnsupportedModelError(
            f"the vision tower of this {family} is a {model_type}, which was not counted: plan for its text alone"
        )
    counted = kinds[kind]["activation"]
    activation = vision.get("hidden_act", counted)
    if activation != counted:
        raise UnsupportedModelError(
            f"the vision tower of this {family} has hidden_act {activation!r}, and was counted with {counted!r} "
            "alone: plan for its text alone"
        )
    return kind


def _shape(
    outer: ModelConfig, tower: ModelConfig, text_hidden: int, family: str, kind: str
) -> TowerShape:
    """Return the shape from the config of the model, that of its tower, and the language model's width."""
    hidden = tower.count("hidden_size")
    inner = tower.count("intermediate_size")
    layers = tower.count("num_hidden_layers")
    side = tower.count("image_size")
    patch = tower.count("patch_size")
    patches = (side // patch) ** 2
    norm = 2 * hidden
    attention = 4 * (hidden**2 + hidden)
    mlp = 2 * hidden * inner + inner + hidden
    layer = attention + mlp + 2 * norm
    # The patches' matrix, the table of their positions, and the norm after the last layer
    other = 3 * patch**2 * hidden
    other += patches * hidden
    other += norm
    positions = patches
    if kind == "clip":
        # The class with its position, and the norm before the first layer
        other += 2 * hidden + norm
        positions += 1
    else:
        other += hidden  # the bias of the patches' matrix
    if tower.get("vision_use_head"):
        # A query that attends to all positions
        other += hidden + attention + norm + mlp
    connect = _OF_FAMILY[family]
    used, tokens, projector = connect(outer, layers, positions, patches, hidden, text_hidden)
    return TowerShape(
        model_type=family,
        kind=kind,
        layers=layers,
        used_layers=used,
        hidden=hidden,
        inner=inner,
        heads=tower.count("num_attention_heads"),
        side=side,
        positions=positions,
        tokens=tokens,
        text_hidden=text_hidden,
        layer_parameters=layer,
        attention_parameters=attention,
        other_parameters=other,
        projector_parameters=projector,
    )


def _llava(
    config: ModelConfig, layers: int, positions: int, patches: int, hidden: int, text_hidden: int
) -> tuple[int, int, int]:
    """Layers that are used, tokens of an image, and parameters of the projector, an MLP of two matrices."""
    layer = config.get("vision_feature_layer")
    if type(layer) is not int or not -layers <= layer <= layers:
        raise UnsupportedModelError(
            f"config of model_type 'llava': vision_feature_layer is {layer!r}, and was counted as one layer of "
            f"{layers}: plan for its text alone"
        )
    strategy = config.get("vision_feature_select_strategy")
    tokens = patches if strategy == "default" else positions
    bias = 2 * text_hidden * config.flag("multimodal_projector_bias")
    projector = hidden * text_hidden + text_hidden**2 + bias
    # Of the hidden states, the first one is the input of the first layer
    return layer % (layers + 1), tokens, projector


def _gemma3(
    config: ModelConfig, layers: int, positions: int, patches: int, hidden: int, text_hidden: int
) -> tuple[int, int, int]:
    """The same; the projector is a matrix, and a norm of the patches of which it makes means."""
    return layers, config.count("mm_tokens_per_image"), hidden * text_hidden + hidden


def _idefics3(
    config: ModelConfig, layers: int, positions: int, patches: int, hidden: int, text_hidden: int
) -> tuple[int, int, int]:
    """The same; the projector is a matrix, of the patches of a square side by side."""
    joined = config.count("scale_factor") ** 2
    return layers, patches // joined, joined * hidden * text_hidden


_OF_FAMILY = {"llava": _llava, "gemma3": _gemma3, "idefics3": _idefics3, "smolvlm": _idefics3}


def tower_parameters(source: Mapping[str, Any] | str | Path) -> int | None:
    """Return about how many parameters the vision tower of an image-and-text model has, which no plan counts.

    Counted are the matrices of a vision transformer (Dosovitskiy et al., arXiv 2010.11929, table 1): four of attention
    and two of the MLP in each layer.

    Args:
        source (`Mapping`, `str` or `Path`): the parsed `config.json`, its path, or its folder.

    Returns:
        `int`, *optional*: the number; None without a tower, or where the config does not name its sizes.
    """
    vision = read_config(source).get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    names = ("num_hidden_layers", "hidden_size", "intermediate_size")
    sizes = [size for size in map(vision.get, names) if type(size) is int]
    if len(sizes) < len(names):
        return None
    layers, hidden, intermediate = sizes
    return layers * (4 * hidden**2 + 2 * hidden * intermediate)
