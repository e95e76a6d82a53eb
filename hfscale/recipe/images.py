"""Images of records: the files that they are in, and batches in which every rank has an image where it needs one.

Records keep their images as they are stored. A batch is made of decoded images by TRL's collator, in the processes of
the data loader.

The ranks of FSDP2 and ZeRO gather weights together, module by module. A rank whose batch has no image would leave the
vision tower out and wait for the others in another collective, forever. Its batch gets a spare row: a record of the
training data with an image, of which no token is trained on. The row changes neither the loss nor the gradients.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL.Image
import torch
from datasets import Dataset, Image, IterableDataset, List, Value
from trl import is_conversational, prepare_multimodal_messages

from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.core.versions import is_peft_model
from hfscale.errors import DataError, UsageError
from hfscale.recipe.arguments import SourceArguments, one_line
from hfscale.recipe.modalities import parts_that_read_images
from hfscale.recipe.sources import AnyDataset, file_of, source_name
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies.requested import requested

if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)

COLUMNS = ("images", "image")
"""Columns with a list of images, or with one."""
IGNORED = -100
"""The label of a token that is not trained on."""
_UNREADABLE = (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError)
"""What Pillow raises about a file that is no image, or a damaged one."""


# ---- records


def read_images(records: AnyDataset, args: SourceArguments, split: str) -> Dataset:
    """Check that the images of a split's records are there, and let them be read when a batch is made.

    Args:
        records (`Dataset`): records with a column of `COLUMNS`: images, or paths of files, which are relative to the
            file or folder of the records.
        args (`SourceArguments`): the source of the records.
        split (`str`): `train` or `validation`.

    Returns:
        `Dataset`: the records; the column holds images that are not decoded. Records without such a column stay.

    Raises:
        DataError: a file is missing or no image, the column holds something else, or the numbers of images and of
            placeholders in a conversation differ.
        UsageError: the records are a stream, or a part of a mix.
    """
    if isinstance(records, IterableDataset):
        given = spelled("streaming", True)
        raise UsageError(
            f"{given}: the files of images are checked before the training; leave it out"
        )
    if args.named_by:
        given = spelled("data_mix")
        raise UsageError(
            f"{given}: sources with images are not mixed; join their records in one file"
        )
    column = next((name for name in COLUMNS if name in records.column_names), None)
    if column is None:
        return records
    source = source_name(args, split)
    feature = records.features[column]
    is_list = isinstance(feature, List)
    kind = feature.feature if is_list else feature
    is_path = isinstance(kind, Value) and kind.dtype in ("string", "large_string")
    if is_list != (column == "images") or not (is_path or isinstance(kind, Image)):
        raise DataError(
            f"{source}: the column {column} holds {feature}: give a list of image files or images in images, or one "
            "in image"
        )
    if is_path:
        check = partial(_with_files, column=column, folder=_folder_of(args, split), source=source)
        records = records.map(check, with_indices=True, desc="checking images")
    # Decoded where a batch is made, so that the error about a damaged image can name it
    stored = Image(decode=False)
    return records.cast_column(column, List(stored) if is_list else stored)


def _folder_of(args: SourceArguments, split: str) -> str:
    """Return the folder to which the paths in a split's records are relative."""
    file = file_of(args, split)
    if file is not None:
        return str(Path(file).resolve().parent)
    return str(Path(args.dataset_name or "").resolve())


def _with_files(
    record: dict[str, Any], number: int, *, column: str, folder: str, source: str
) -> dict[str, Any]:
    """Return the absolute paths of a record's images, which were found to be images."""
    given = record[column]
    if column == "image":
        given = [] if given is None else [given]
    files = [str(Path(folder, path)) for path in given or []]
    where = f"{source}: record {number + 1}"
    for file in files:
        try:
            PIL.Image.open(file).close()  # it reads the beginning of the file
        except FileNotFoundError:
            raise DataError(
                f"{where}: {file} does not exist: correct the path; relative ones begin at {folder}"
            ) from None
        except _UNREADABLE as error:
            raise DataError(f"{where}: {file} is no image: {one_line(error)}") from None
    if is_conversational(record):
        said: Any = record.get("messages") or record.get("prompt")
        try:
            prepare_multimodal_messages(said, images=files)
        except ValueError as error:
            raise DataError(f"{where}: {one_line(error)}") from None
    if column == "images":
        return {column: files}
    return {column: next(iter(files), None)}


# ---- batches


class ImageCollator:
    """Makes batches with TRL's collator from records whose images are not decoded.

    Args:
        collator (`Callable`): TRL's `DataCollatorForVisionLanguageModeling`.
        spare (`Mapping`, *optional*): a record with an image, which is added, without a token to train on, to each
            batch that has none. None: such a batch stays as it is.
    """

    def __init__(self, collator: Any, spare: Mapping[str, Any] | None = None) -> None:
        self.collator = collator
        self.spare = spare

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [_decoded(record) for record in records]
        has_image = any(row["images"] for row in rows)
        if self.spare is None or has_image:
            return self._batch(rows)
        batch = self._batch([*rows, _decoded(self.spare)])
        batch["labels"][-1] = IGNORED
        return batch

    def _batch(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the batch of some rows.

        Raises:
            DataError: the processor refuses them, or an image would be cut at the end of a sequence.
        """
        longest = self.collator.max_length
        self.collator.max_length = None
        try:
            batch: dict[str, Any] = self.collator(rows)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise DataError(f"a batch cannot be made of images and text: {reason}") from error
        finally:
            self.collator.max_length = longest
        return batch if longest is None else _cut(batch, longest, self._image_tokens())

    def _image_tokens(self) -> list[int]:
        """Return the ids of the tokens in whose place the model puts what it has read in images."""
        return [token for token in self.collator.processor.image_token_ids if token is not None]


def _cut(batch: dict[str, Any], longest: int, image_tokens: Sequence[int]) -> dict[str, Any]:
    """Cut the sequences of a batch at their ends; TRL would cut images too, which the model refuses in the step."""
    tokens = batch["input_ids"]
    length = tokens.shape[1]
    if length <= longest:
        return batch
    if torch.isin(tokens[:, longest:], torch.tensor(image_tokens)).any():
        given = spelled("max_length", longest)
        raise DataError(
            f"{given} cuts an image: a sequence has {length} tokens with its images; raise it, or use smaller images"
        )
    for name, values in batch.items():
        if torch.is_tensor(values) and values.shape == tokens.shape:
            batch[name] = values[:, :longest]
    return batch


def _decoded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with a list of decoded images; TRL changes records, so that it is a copy."""
    row = copy.deepcopy(dict(record))
    stored = row.pop("image", None)
    images = row.pop("images", None) or []
    if stored is not None:
        images = [stored]
    row["images"] = [_decode(image) for image in images]
    return row


def _decode(stored: Any) -> PIL.Image.Image:
    """Return an image as `datasets` decodes it, with the orientation that the camera has noted."""
    if isinstance(stored, PIL.Image.Image):
        return stored
    try:
        image: PIL.Image.Image = Image().decode_example(stored)
    except _UNREADABLE as error:
        name = stored.get("path") or "an image of the training data"
        raise DataError(f"{name} cannot be read: {one_line(error)}: replace it") from error
    return image


def _has_image(record: Mapping[str, Any]) -> bool:
    return any(record.get(column) for column in COLUMNS)


def find_record_with_image(records: Dataset) -> dict[str, Any]:
    """Return the first record that has an image.

    Args:
        records (`Dataset`): the training data.

    Raises:
        DataError: no record has one.
    """
    column = next(name for name in COLUMNS if name in records.column_names)
    for number, record in enumerate(records.select_columns([column])):
        if _has_image(record):
            found: dict[str, Any] = records[number]
            return found
    raise DataError("no record has an image: train a model of text alone with recipes/sft")


def make_image_batches(trainer: "Trainer") -> None:
    """Let a Trainer of a recipe make batches of images that are not decoded. Call it before `trainer.train()`.

    Args:
        trainer (`Trainer`): its collator, TRL's, is replaced.

    Raises:
        DataError: no record of the training data has an image.
    """
    records: Any = trainer.train_dataset
    spare: dict[str, Any] | None = find_record_with_image(records)
    if not _needs_images(trainer):
        spare = None
    TrainerAdapter.of(trainer).wrap_data_collator(partial(ImageCollator, spare=spare))
    if spare is not None:
        logger.info(
            "a batch without an image gets a record with one, of which no token is trained on"
        )


def _needs_images(trainer: "Trainer") -> bool:
    """Return whether the ranks of a run wait for each other in the vision tower."""
    if trainer.args.world_size == 1:
        return False
    if not requested(trainer.args).is_replicated:
        return True
    model: Any = model_of(trainer)
    if is_peft_model(model):
        model = model.get_base_model()
    tower, others = parts_that_read_images(model)
    return any(parameter.requires_grad for parameter in (*tower, *others))
