"""Device memory that two processes see, through the CUDA driver: what torch itself shares depends on the allocator's
settings, which a strategy may choose.

Source: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html (cuIpcGetMemHandle, cuIpcOpenMemHandle).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from optexp.errors import Unshared

_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * 64)]


def allocate(size: int) -> tuple[Tensor, bytes]:
    """New bytes on the current device, apart from all that torch allocates, and the handle by which another process
    finds them. They are the driver's again with the last tensor of this process that shows them.

    All zero: the driver hands out memory that this process has freed before, with contents that others must not see.
    """
    torch.cuda.synchronize()  # the driver knows the device once torch has used it
    address, handle = ctypes.c_uint64(), _Handle()
    _ask("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    memory = _Bytes(address.value, size, "cuMemFree_v2")
    _ask("cuIpcGetMemHandle", ctypes.byref(handle), address)
    name = bytes(handle)
    _own[name] = memory
    return torch.as_tensor(memory, device="cuda").zero_(), name


def attach(handle: bytes, size: int) -> Tensor:
    """The bytes that a process has allocated on the current device: another one, or this."""
    if (memory := _own.get(handle)) is not None:
        return torch.as_tensor(memory, device="cuda")
    torch.cuda.synchronize()  # as above
    address, found = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
    _ask("cuIpcOpenMemHandle_v2", ctypes.byref(address), found, ctypes.c_uint(_PEER_ACCESS))
    return torch.as_tensor(_Bytes(address.value, size, "cuIpcCloseMemHandle"), device="cuda")


class _Bytes:
    """Memory that torch makes a tensor of, without a copy; given back with the last tensor."""

    def __init__(self, address: int, size: int, give_back: str) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
        self._address, self._give_back = address, _function(give_back)

    def __del__(self) -> None:
        self._give_back(ctypes.c_uint64(self._address))


_own: WeakValueDictionary[bytes, _Bytes] = WeakValueDictionary()  # kept by the tensors that show it


def _ask(name: str, *arguments: object) -> None:
    if code := _function(name)(*arguments):
        raise Unshared(f"{name} fails with CUDA error {code}")


@cache
def _function(name: str) -> Callable[..., int]:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as reason:
        raise Unshared(str(reason)) from reason
    return function
