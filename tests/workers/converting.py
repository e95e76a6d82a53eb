"""Converts checkpoint 4 of `committing.py`: the copy is in a folder of a folder that did not exist."""

from pathlib import Path

from hfscale.checkpoint.conversion import convert
from hfscale.checkpoint.store import verify

if __name__ == "__main__":
    source = Path("out", "checkpoint-4")
    convert(source, Path("new", "folder", source.name), manifest=verify(source), strategy="ddp", world_size=1)
