"""`hfscale configs`: list, show or copy the shipped configs, training scripts and launch files."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from hfscale.core.shipped import (
    ShippedConfig,
    find_config,
    find_launch_files,
    list_configs,
    others_named,
    shipped_root,
)
from hfscale.errors import StorageError, UsageError

_DEEPSPEED_FILE = re.compile(r"^( *deepspeed_config_file: *)(\S+)", re.MULTILINE)

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A config as `list` prints it, or its file name with or without extension.",
    ),
]


def list_(as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False) -> None:
    """List the shipped configs."""
    configs = list_configs()
    if as_json:
        rows = [
            {"name": config.name, "kind": config.kind, "summary": config.summary}
            for config in configs
        ]
        print(json.dumps(rows))
        return
    width = max(len(config.name) for config in configs)
    for config in configs:
        print(f"{config.name:{width}}  {config.summary}")


def show(
    name: Name, as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
) -> None:
    """Print a config."""
    config = _find(name)
    text = config.path.read_text(encoding="utf-8")
    print(
        json.dumps({"name": config.name, "kind": config.kind, "text": text})
        if as_json
        else text.rstrip("\n")
    )


def copy(
    name: Name,
    dest: Annotated[
        Path, typer.Argument(metavar="[DEST]", help="A folder, or the path of a new file.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Copy a config to your own project, with the DeepSpeed JSON file that it refers to, in a folder ds_configs.

    The copy of an Accelerate config names the JSON file by its absolute path. A folder of launch/, such as
    launch/slurm, is copied into a folder launch of DEST, with the other folders that its files use.
    """
    if launch_files := find_launch_files(name):
        _copy_launch_files(
            {dest / config.name: config.path for config in launch_files}, force=force
        )
        return
    config = _find(name)
    target = dest / config.path.name if dest.is_dir() else dest
    copies = {target: config.path.read_text(encoding="utf-8")}
    if config.kind == "accelerate":
        copies |= _with_deepspeed_files(copies[target], target)
    # Several configs share a DeepSpeed file: one that is there already, unchanged, is no obstacle.
    for copied, text in copies.items():
        is_shared = copied != target and copied.is_file()
        if is_shared:
            is_shared = copied.read_text(encoding="utf-8") == text
        if copied.exists() and not force and not is_shared:
            raise UsageError(f"{copied} exists: give another DEST, or --force to overwrite it")
    for copied, text in copies.items():
        try:
            if copied != target:
                copied.parent.mkdir(exist_ok=True)
            copied.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{copied} cannot be written: {error.strerror}") from None
        print(copied)


def _find(name: str) -> ShippedConfig:
    """Return the config of this name; a line says which one it is if other recipes have the name too."""
    config = find_config(name)
    others = others_named(config, name)
    if others:
        print(
            f"hfscale: {name} is {config.name}; of the same name: {', '.join(others)}",
            file=sys.stderr,
        )
    return config


def _copy_launch_files(copies: dict[Path, Path], *, force: bool) -> None:
    """Copy files, by the path of each copy, with their permissions; an equal file that is there is no conflict."""
    for copied, original in copies.items():
        if copied.exists() and not force and copied.read_bytes() != original.read_bytes():
            raise UsageError(f"{copied} exists: give another DEST, or --force to overwrite it")
    for copied, original in copies.items():
        try:
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(original, copied)
        except OSError as error:
            raise StorageError(f"{copied} cannot be written: {error.strerror}") from None
        print(copied)


def _with_deepspeed_files(text: str, target: Path) -> dict[Path, str]:
    """Return an Accelerate config and the DeepSpeed files that it refers to, by the path of each copy.

    Accelerate reads a relative path from the folder where it is launched, so the copied config has an absolute one.
    """
    files: dict[Path, str] = {}

    def absolute(found: re.Match[str]) -> str:
        copied = target.parent / found[2]
        files[copied] = (shipped_root() / found[2]).read_text(encoding="utf-8")
        return f"{found[1]}{json.dumps(str(copied.absolute()))} # absolute: you can launch from any folder"

    return {target: _DEEPSPEED_FILE.sub(absolute, text), **files}


COMMAND = {"list": list_, "show": show, "copy": copy}
