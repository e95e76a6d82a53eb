"""The plug-in of axolotl: `plugins: [hfscale.plugins.axolotl.HfscalePlugin]`.

A section `hfscale:` of the same YAML file has options of the callback's parts. The same command resumes a run that was
stopped. Tried with axolotl 0.19.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from hfscale.errors import HfScaleError
from hfscale.plugins.section import callback_of, checkpoint_of


class HfscaleArgs(BaseModel):
    """What the YAML file may say beside axolotl's own keys."""

    hfscale: dict[str, Any] | None = None
    """Options of the callback's parts, by name."""

    @field_validator("hfscale")
    @classmethod
    def check_options(cls, section: dict[str, Any] | None) -> dict[str, Any] | None:
        """Check the options by making the callback.

        Args:
            section (`dict[str, Any]`, *optional*): the section.

        Raises:
            ValueError: what the callback refuses, which axolotl prints as an error of the file.
        """
        try:
            callback_of(section)
        except HfScaleError as error:
            raise ValueError(str(error)) from None
        return section


class HfscalePlugin(BasePlugin):  # type: ignore[misc]  # axolotl has no types
    """Adds `ScalingCallback`, and resumes from the newest verified checkpoint."""

    def get_input_args(self) -> str:
        """Return where axolotl finds the keys of the YAML file that are ours."""
        return "hfscale.plugins.axolotl.HfscaleArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Choose the checkpoint, unless the file names one.

        Args:
            cfg (`DictDefault`): axolotl's config; changed in place.
        """
        if not cfg.resume_from_checkpoint:
            cfg.resume_from_checkpoint = checkpoint_of(cfg.output_dir, cfg.hfscale)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback.

        Args:
            cfg (`DictDefault`): axolotl's config.
            model (`PreTrainedModel`): the model, which is not read.
        """
        return [callback_of(cfg.hfscale)]
