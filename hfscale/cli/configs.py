"""`hfscale configs`: list, show or copy the shipped configs."""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from hfscale.cli import COMMANDS
from hfscale.errors import StorageError, UsageError
from hfscale.utils.shipped import find_config, list_configs

Name = Annotated[str, typer.Argument(metavar="NAME", help="A config as `list` prints it, or its file name or stem.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    configs = typer.Typer(rich_markup_mode=None)
    configs.command("list")(list_)
    configs.command("show")(show)
    configs.command("copy")(copy)
    app.add_typer(configs, name="configs", help=COMMANDS["configs"])


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
    dest: Annotated[Path, typer.Argument(metavar="[DEST]", help="A folder or a new file.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Copy a config to your own project."""
    config = find_config(name)
    target = dest / config.path.name if dest.is_dir() else dest
    if target.exists() and not force:
        raise UsageError(f"{target} exists: give another DEST, or --force to overwrite it")
    try:
        shutil.copyfile(config.path, target)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror}") from None
    print(target)
