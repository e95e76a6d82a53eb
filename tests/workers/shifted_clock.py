"""Shifts the date of a process by what a file says, as NTP does; `shifted_clock.py FILE WORDS` runs hfscale's CLI."""

import mmap
import os
import struct
import sys
import time

SECONDS = struct.Struct("=d")
real_time = time.time


def shift(path, seconds):
    """Set the date of all processes that have `install`ed this file."""
    path.write_bytes(SECONDS.pack(seconds))


def install(path):
    """Have `time.time` of this process follow the file, which `shift` has made."""
    descriptor = os.open(path, os.O_RDWR)
    memory = mmap.mmap(descriptor, SECONDS.size)
    os.close(descriptor)
    time.time = lambda: real_time() + SECONDS.unpack_from(memory)[0]


if __name__ == "__main__":
    install(sys.argv.pop(1))
    from hfscale.cli import main

    sys.exit(main())
