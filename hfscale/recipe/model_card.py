"""The part of an exported model's card (README.md) that says how it was trained, and the checksums of its files."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml
from huggingface_hub import ModelCard, ModelCardData

from hfscale import __version__
from hfscale.core.durable_files import write_atomically
from hfscale.core.run_reader import run_reader
from hfscale.core.text_files import read_text
from hfscale.errors import DataError
from hfscale.trainer.state import model_of, output_folder

if TYPE_CHECKING:
    from transformers import Trainer

CARD_NAME = "README.md"
_BEGIN = "<!-- hfscale: begin -->"
_END = "<!-- hfscale: end -->"
_BLOCK_BYTES = 2**24


def write_model_card(trainer: "Trainer", folder: Path) -> None:
    """Write how a model was trained into its card. Text that is there already, such as PEFT's, is kept.

    Args:
        trainer (`Trainer`): the trainer of the completed run.
        folder (`Path`): the folder of the exported model; its `.safetensors` files are read for their checksums.

    Raises:
        OSError: a file cannot be read or written.
        DataError, ValueError: the card that is there has metadata that is not YAML, or not that of a card.
        UsageError: the run has left no measurements.
    """
    path = folder / CARD_NAME
    try:
        card = ModelCard(read_text(path) if path.is_file() else "---\n{}\n---\n")
    except yaml.YAMLError as error:
        raise DataError(
            f"the metadata of {path} is not YAML: {' '.join(str(error).split())}"
        ) from None
    before, _, rest = card.text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    card.text = f"{before.rstrip()}\n\n{_section(trainer, folder)}\n{after.lstrip()}".lstrip()
    data = cast(ModelCardData, card.data)
    data.library_name = data.library_name or "transformers"
    base = getattr(model_of(trainer).config, "name_or_path", "")
    if base and not Path(base).exists():  # a folder of this machine says nothing to others
        data.base_model = data.base_model or base
    data.tags = sorted({*(data.tags or []), "hfscale"})
    write_atomically(path, str(card))


def _section(trainer: "Trainer", folder: Path) -> str:
    rows = run_reader().card_facts(output_folder(trainer.args))
    lines = [
        _BEGIN,
        "## How it was trained",
        "",
        f"With hfscale {__version__}.",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {name} | {_cell(text)} |" for name, text in rows]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        lines += ["", "| file | SHA-256 |", "|---|---|"]
        lines += [f"| `{path.name}` | `{_sha256(path)}` |" for path in files]
    return "\n".join([*lines, _END])


def _cell(text: str) -> str:
    """Return text that cannot leave its cell: it comes from the files of the run."""
    plain = " ".join(text.split())
    return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()
