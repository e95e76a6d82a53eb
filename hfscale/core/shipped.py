"""Finds the configs and recipes that come with hfscale: in the checkout, or inside the installed package."""

from dataclasses import dataclass
from pathlib import Path

from hfscale.errors import UsageError

_PACKAGE = Path(__file__).parent.parent
_KINDS = {
    "accelerate": ("accelerate_configs", "*.yaml"),
    "deepspeed": ("ds_configs", "*.json"),
    "recipe": ("recipes", "*.yaml"),
    "trl": ("recipes", "*.yaml"),
    "script": ("recipes", "train.py"),
}
_TRL_FOLDERS = ("sft", "dpo", "grpo")
_REMOVED = {  # file name -> why it is gone, and what to use
    f"{name}.json": f"DeepSpeed has had no 1-bit optimizers since 0.19.7: use accelerate_configs/{name}.yaml with "
    f"--gradient_compression {name}"
    for name in ("onebit_adam", "onebit_lamb")
}


@dataclass(frozen=True, kw_only=True)
class ShippedConfig:
    """A config file, or the training script of a recipe, that comes with hfscale."""

    name: str
    """Path as in the repository, `accelerate_configs/ddp.yaml`; its short names are `ddp.yaml` and `ddp`."""
    kind: str
    """`accelerate`, `deepspeed`, `recipe`, `trl` (a recipe that runs TRL) or `script`."""
    path: Path
    """Its path on this machine."""

    @property
    def names(self) -> set[str]:
        """The names by which it can be found."""
        full = Path(self.name)
        return {self.name, full.name, full.stem, f"{full.parent.name}/{full.name}"}

    @property
    def summary(self) -> str:
        """Its first comment line that is not the launch command, or the first line of its docstring."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        if self.kind == "script":
            return lines[0].strip('"')
        for line in lines:
            text = line.lstrip("# ").strip()
            if not line.startswith("#"):
                break
            if text and not text.startswith(("accelerate launch", "--", "recipes/")):
                return text
        return ""


def shipped_root() -> Path:
    """Return the folder that holds `accelerate_configs/`, `ds_configs/` and `recipes/`."""
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
            found.append(ShippedConfig(name=path.relative_to(root).as_posix(), kind=kind, path=path))
    return found


def find_config(name: str) -> ShippedConfig:
    """Find a shipped config by name; kinds take precedence in the order `accelerate`, `deepspeed`, `recipe`,
    `trl`, `script`.

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
        known = ", ".join(config.name for config in configs)
        raise UsageError(f"no shipped config is named '{name}': choose one of {known}")
    first_kind = [config for config in matches if config.kind == matches[0].kind]
    if len(first_kind) > 1:
        raise UsageError(f"'{name}' is more than one config: give {' or '.join(config.name for config in first_kind)}")
    return matches[0]
