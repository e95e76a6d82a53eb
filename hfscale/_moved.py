"""Keeps old import paths working that recipes have shown, so that a copied recipe still runs.

`import hfscale.data` returns the module object of `hfscale.recipe.data`, with a DeprecationWarning that names the new
path.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "hfscale.arguments": "hfscale.recipe.arguments",
    "hfscale.compatibility": "hfscale.recipe.compatibility",
    "hfscale.compression": "hfscale.recipe.compression",
    "hfscale.continuation": "hfscale.integrations.loading",
    "hfscale.data": "hfscale.recipe.data",
    "hfscale.dry_run": "hfscale.parallel.dry_run",
    "hfscale.entrypoint": "hfscale.recipe.entrypoint",
    "hfscale.export": "hfscale.recipe.entrypoint",
    "hfscale.models": "hfscale.recipe.models",
    "hfscale.parallelism": "hfscale.recipe.layout",
    "hfscale.parsing": "hfscale.recipe.parsing",
    "hfscale.resume": "hfscale.recipe.resume",
    "hfscale.sequence_parallel": "hfscale.integrations.sequence_parallel",
    "hfscale.stage_flags": "hfscale.parallel.arguments",
    "hfscale.strategy": "hfscale.integrations.strategy",
    "hfscale.summary": "hfscale.recipe.entrypoint",
}
"""New import paths by old import path."""


class _MovedModules:  # without the base classes of importlib.abc, whose import takes as long as all of hfscale
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} has moved: import {new}", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the module's spec by that of the old path: restore it.
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make the old paths importable; called once, when `hfscale` is imported."""
    sys.meta_path.append(_MovedModules())
