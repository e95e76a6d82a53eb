"""`hfscale configs`: list, show or copy the shipped configs and training scripts."""

import json
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from hfscale.errors import StorageError, UsageError
from hfscale.utils.shipped import ShippedConfig, find_config, list_configs, shipped_root

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A config as `list` prints it, or its file name with or without extension."),
]


def list_(as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False) -> None:
    """List the shipped configs."""
    configs = list_configs()
    if as_json:
        rows = [{"name": config.name, "kind": config.kind, "summary": config.summary} for config in configs]
        print(json.dumps(rows))
        return
    width = max(len(config.name) for config in configs)
    for config in configs:
        print(f"{config.name:{width}}  {config.summary}")


def show(name: Name, as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Print a config."""
    config = find_config(name)
    text = config.path.read_text(encoding="utf-8")
    print(json.dumps({"name": config.name, "kind": config.kind, "text": text}) if as_json else text.rstrip("\n"))


def copy(
    name: Name,
    dest: Annotated[Path, typer.Argument(metavar="[DEST]", help="A folder, or the path of a new file.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Copy a config to your own project, with the DeepSpeed JSON file that it refers to, in a folder ds_configs."""
    config = find_config(name)
    target = dest / config.path.name if dest.is_dir() else dest
    copies = [(config.path, target), *((path, target.parent / name) for name, path in _referenced_files(config))]
    for source, copied in copies:
        is_same = copied.is_file() and source != config.path and copied.read_bytes() == source.read_bytes()
        if copied.exists() and not force and not is_same:
            raise UsageError(f"{copied} exists: give another DEST, or --force to overwrite it")
    for source, copied in copies:
        try:
            if source != config.path:
                copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, copied)
        except OSError as error:
            raise StorageError(f"{copied} cannot be written: {error.strerror}") from None
        print(copied)


def _referenced_files(config: ShippedConfig) -> list[tuple[str, Path]]:
    """The files that an Accelerate config reads from the folder where it is launched: their names there, and paths."""
    if config.kind != "accelerate":
        return []
    names = re.findall(r"^ *deepspeed_config_file: *(\S+)", config.path.read_text(encoding="utf-8"), re.MULTILINE)
    return [(name, shipped_root() / name) for name in names]


COMMAND = {"list": list_, "show": show, "copy": copy}
