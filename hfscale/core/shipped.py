"""Finds the configs, recipes and launch files that come with hfscale: in the checkout, or in the installed package."""

import re
from dataclasses import dataclass
from pathlib import Path

from hfscale.core.flags import nearest
from hfscale.errors import UsageError

_PACKAGE = Path(__file__).parent.parent
_KINDS = {
    "accelerate": ("accelerate_configs", "*.yaml"),
    "deepspeed": ("ds_configs", "*.json"),
    "recipe": ("recipes", "*.yaml"),
    "trl": ("recipes", "*.yaml"),
    "script": ("recipes", "train.py"),
    "launch": ("launch", "*"),
}
_LAUNCH_FILE = re.compile(r"(?:launch|\.\.)/([a-z]+)/\w[\w.-]*\w")
_TRL_FOLDERS = ("sft", "vision", "dpo", "grpo", "distillation")
_REMOVED = {  # file name -> why it is gone, and what to use
    f"{name}.json": f"DeepSpeed has had no 1-bit optimizers since 0.19.7: use accelerate_configs/{name}.yaml with "
    f"--gradient_compression {name}"
    for name in ("onebit_adam", "onebit_lamb")
}


@dataclass(frozen=True, kw_only=True)
class ShippedConfig:
    """A config file, the training script of a recipe, or a launch file that comes with hfscale."""

    name: str
    """Path as in the repository, `accelerate_configs/ddp.yaml`; its short names are `ddp.yaml` and `ddp`."""
    kind: str
    """`accelerate`, `deepspeed`, `recipe`, `trl` (a recipe that runs TRL), `script` or `launch`."""
    path: Path
    """Its path on this machine."""

    @property
    def names(self) -> set[str]:
        """The names by which it can be found."""
        full = Path(self.name)
        if self.kind == "launch":
            return {
                self.name,
                full.parent.as_posix(),
                full.parent.name,
                f"{full.parent.name}/{full.name}",
            }
        return {self.name, full.name, full.stem, f"{full.parent.name}/{full.name}"}

    @property
    def summary(self) -> str:
        """The first sentence of its comment after the launch command, or of its docstring."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        # Each kind says what it is for in another place; JSON, which has no comments, in the config that reads it.
        if self.kind == "deepspeed":
            reader = Path(self.name).with_suffix(".yaml").name
            if (shipped_root() / "accelerate_configs" / reader).is_file():
                return f"read by accelerate_configs/{reader}"
            return ""
        if self.kind == "script":
            return lines[0].removeprefix("r").strip('"')
        if self.kind == "launch":
            first = next(number for number, line in enumerate(lines) if "When: " in line)
            return "When: " + _first_sentence(
                [lines[first].split("When: ", 1)[1], *lines[first + 1 :]]
            )
        for number, line in enumerate(lines):
            text = line.lstrip("# ").strip()
            if not line.startswith("#"):
                break
            if text and not text.startswith(("accelerate launch", "--", "recipes/")):
                return _first_sentence(lines[number:])
        return ""


def _first_sentence(lines: list[str]) -> str:
    """Return the first sentence of a comment or docstring that begins with the first line."""
    words: list[str] = []
    for line in lines:
        words += line.lstrip("# ").split()
        text = " ".join(words)
        if found := re.match(r".*?[.](?= [A-Z]|$)", text):
            return found[0]
        if not line.strip("# "):
            break
    return " ".join(words)


def shipped_root() -> Path:
    """Return the folder that holds `accelerate_configs/`, `ds_configs/`, `recipes/` and `launch/`."""
    in_wheel = _PACKAGE / "shipped"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent


def list_configs() -> list[ShippedConfig]:
    """Return all shipped configs, sorted by kind and name."""
    root = shipped_root()
    found = []
    for kind, (folder, pattern) in _KINDS.items():
        for path in sorted((root / folder).rglob(pattern)):
            if kind in ("recipe", "trl") and (path.parent.name in _TRL_FOLDERS) != (kind == "trl"):
                continue
            # There lies the page about all
            if kind == "launch" and (path.is_dir() or path.parent == root / folder):
                continue
            if "__pycache__" in path.parts:
                continue
            found.append(
                ShippedConfig(name=path.relative_to(root).as_posix(), kind=kind, path=path)
            )
    return found


def find_config(name: str) -> ShippedConfig:
    """Find a shipped config by name; kinds take precedence in the order `accelerate`, `deepspeed`, `recipe`,
    `trl`, `script`, `launch`.

    Args:
        name (`str`): one of its names (`ShippedConfig.names`).

    Raises:
        UsageError: no config has this name, or several of one kind have it.
    """
    configs = list_configs()
    matches = [config for config in configs if name in config.names]
    if not matches:
        if Path(name).name in _REMOVED:
            raise UsageError(f"{name} is no longer shipped, because {_REMOVED[Path(name).name]}")
        hint = nearest(name, {known for config in configs for known in config.names})
        raise UsageError(
            f"no shipped config is named '{name}'{hint or '; see hfscale configs list'}"
        )
    # A short name may be that of an Accelerate config and of the DeepSpeed file that it reads; within a kind it names
    # one file.
    first_kind = [config for config in matches if config.kind == matches[0].kind]
    if len(first_kind) > 1:
        named = " or ".join(config.name for config in first_kind)
        raise UsageError(f"'{name}' is more than one config: give {named}")
    return matches[0]


def others_named(config: ShippedConfig, name: str) -> list[str]:
    """Return the full names of other recipes that `name` could mean, where `find_config` has chosen one by its kind.

    Args:
        config (`ShippedConfig`): what `find_config` returned.
        name (`str`): the name for which it did.
    """
    if config.kind not in ("recipe", "trl"):
        return []
    return [
        other.name for other in list_configs() if name in other.names and other.name != config.name
    ]


def find_launch_files(name: str) -> list[ShippedConfig]:
    """Find the launch files of a folder, with those of the folders that they refer to.

    Args:
        name (`str`): the folder, such as `launch/slurm` or `slurm`, or a file in it.

    Returns:
        `list[ShippedConfig]`: the files; none if no launch file has this name.
    """
    files = [config for config in list_configs() if config.kind == "launch"]
    wanted = {config.path.parent.name for config in files if name in config.names}
    found: set[str] = set()
    # Folders refer to files of folders that refer to others: without one of them nothing starts.
    while wanted - found:
        found |= wanted
        texts = [
            config.path.read_text(encoding="utf-8")
            for config in files
            if config.path.parent.name in found
        ]
        wanted = {reference[1] for text in texts for reference in _LAUNCH_FILE.finditer(text)}
    return [config for config in files if config.path.parent.name in found]
