"""What only CUDA's driver library tells about the devices of a process."""

import ctypes
from functools import cache

import torch


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    assert library.cuInit(0) == 0
    return library


def open_contexts() -> list[int]:
    """Return the indices of the GPUs on which this process has a context."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    found = []
    for index in range(torch.cuda.device_count()):
        assert _driver().cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active)) == 0
        if active.value:
            found.append(index)
    return found


def pci_address(index: int) -> str:
    """Return the PCI address of a GPU, such as `0000:17:00.0`."""
    text = ctypes.create_string_buffer(32)
    assert _driver().cuDeviceGetPCIBusId(text, len(text), index) == 0
    return text.value.decode().lower()
