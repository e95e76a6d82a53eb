"""The arguments of the recipe that fine-tunes vision-language models: what is trained, and the processor."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import AutoProcessor, ProcessorMixin

from hfscale.core.flags import require_positive
from hfscale.core.logging import get_logger
from hfscale.core.option_flags import flag
from hfscale.core.spelling import speaking, spelled
from hfscale.core.versions import require
from hfscale.core.vocabulary import knows_no_text
from hfscale.errors import UsageError
from hfscale.recipe.arguments import RecipeTrainingMixin, errors_name_flag
from hfscale.recipe.modalities import compute_without_gradients, parts_that_read_images
from hfscale.recipe.model_arguments import ModelArguments

require("vision recipes")

from trl import SFTConfig  # noqa: E402 (after the check)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = get_logger(__name__)


@dataclass(kw_only=True)
class VisionArguments(RecipeTrainingMixin, SFTConfig):
    """TRL's `SFTConfig` for records with images, with the defaults and checks of the recipes."""

    records: ClassVar[str | None] = "pictures"
    task: ClassVar[str] = "sft"
    reads_images: ClassVar[bool] = True

    max_length: int | None = flag(
        "Most tokens of a sequence, those of its images included; an image is never cut. Default: no limit."
    )
    train_vision_tower: bool = flag(
        "Train the vision tower too. By default it is frozen.", default=False
    )
    train_projector: bool | None = flag(
        "Train what leads from the tower to the language model. Default: true, but false with --use_peft and where it "
        "is a part of a frozen tower."
    )
    ddp_find_unused_parameters: bool | None = flag(
        "Search each backward pass for parameters without a gradient. Default: where parts that read images are "
        "trained, of which a tower may use some for other purposes."
    )

    def __post_init__(self) -> None:
        require_positive(self, "max_length")
        super().__post_init__()

    def check_method(self, model_args: ModelArguments) -> None:
        """Check what the flags ask of TRL's trainer for records with images.

        Args:
            model_args (`ModelArguments`): the flags of the model and of the adapters.

        Raises:
            UsageError: TRL has no such training, or two flags exclude each other.
        """
        for name in ("packing", "padding_free"):
            if vars(self)[name]:
                given = spelled(name, True)
                raise UsageError(f"{given}: TRL packs no records with images; leave it out")
        for name in ("train_vision_tower", "train_projector"):
            if model_args.use_peft and vars(self)[name]:
                given = spelled(name, True)
                adapters = spelled("use_peft", True)
                raise UsageError(
                    f"{given} and {adapters}: adapters are of the language model, and everything else is frozen; give "
                    "one of them"
                )
        checkpointing: Any = self.gradient_checkpointing_kwargs or {}
        if self.train_vision_tower and checkpointing.get("use_reentrant"):
            given = spelled("train_vision_tower", True)
            raise UsageError(
                f"{given}: reentrant checkpointing (use_reentrant) leaves out the gradients of a tower, whose input "
                "needs none; set it to false"
            )

    @speaking("recipe")
    def load_processor(self, model_args: ModelArguments) -> ProcessorMixin:
        """Load the processor of `--tokenizer_name`, or the model's own, or the one of the embedded pictures.

        Args:
            model_args (`ModelArguments`): the names of the model and of the tokenizer.

        Raises:
            UsageError: it cannot be loaded, or is one of text alone.
        """
        name = model_args.tokenizer_name or model_args.model_name_or_path or model_args.config_name
        if name is None:
            from hfscale.recipe.pictures import default_processor

            return default_processor()
        option = "--model_name_or_path or --config_name (for its processor)"
        if model_args.tokenizer_name:
            option = "--tokenizer_name"
        with errors_name_flag(option, name):
            processor = AutoProcessor.from_pretrained(name)
        if not isinstance(processor, ProcessorMixin):
            raise UsageError(
                f"{option} {name} has no processor of images, only {type(processor).__name__}: name a vision-language "
                "model, or train text with recipes/sft"
            )
        if knows_no_text(processor):
            raise UsageError(
                f"{option} {name} has no tokenizer: give the --tokenizer_name of the model"
            )
        return processor

    def choose_trained_parts(self, model: "PreTrainedModel", *, use_peft: bool) -> None:
        """Freeze those parts of a model that read images and are not to be trained.

        Args:
            model (`PreTrainedModel`): the model, before adapters are added.
            use_peft (`bool`): whether adapters of the language model are trained.

        Raises:
            UnsupportedModelError: transformers knows no vision tower of the model.
            UsageError: the projector is to be trained without the tower that contains it.
        """
        tower, projector = parts_that_read_images(model)
        trains_projector = self.train_projector
        # A frozen tower with a trained projector is how most of these models were fine-tuned first
        if trains_projector is None:
            trains_projector = bool(projector) and not use_peft
        if trains_projector and not projector and not self.train_vision_tower:
            given = spelled("train_projector", True)
            raise UsageError(
                f"{given}: the projector of {model.config.model_type} is a part of its vision tower; give "
                f"{spelled('train_vision_tower', True)}, or leave it out"
            )
        for weight in tower:
            weight.requires_grad_(self.train_vision_tower)
        if not self.train_vision_tower:
            compute_without_gradients(model.get_encoder(modality="image"))
        for weight in projector:
            weight.requires_grad_(trains_projector)
        if self.ddp_find_unused_parameters is None and not (
            self.train_vision_tower or trains_projector
        ):
            self.ddp_find_unused_parameters = False
        logger.info(
            "vision tower: %s; projector: %s",
            "trained" if self.train_vision_tower else "frozen",
            "trained" if trains_projector else "frozen",
        )
