"""NCCL between the GPUs of an engine's ranks, on any stream, in CUDA graphs too.

Its library is called itself: torch's process groups reduce in place only, and put a thread between that asks CUDA for
events while a graph is captured. Every rank gets the same bits of a sum: ring and tree add up each element in one order on
its way through the ranks, and hand the finished one on.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import Any

import torch

from dsc.runtime.errors import DscError
from dsc.runtime.ranks.group import Group

LIBRARY = "libnccl.so.2"  # torch's own, which it has loaded
_DTYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "bfloat16": 9}
_REDUCE = {"sum": 0, "max": 2}
_ID_BYTES = 128


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_INT)],
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT],
    "ncclAllReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclAllGather": [_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER],
    "ncclCommAbort": [_POINTER],
}


class Nccl:
    """One rank's end of a communicator over all ranks of `group`, on the current device. Making one waits for all ranks.

    It ends with the process: NCCL keeps what captured graphs refer to. Raises DscError where there is no NCCL.
    """

    def __init__(self, group: Group, where: str) -> None:
        self._where = where
        self._library = _load(where)
        self.version = self._version()
        self._communicator: ctypes.c_void_p | None = None
        unique = self._meet(group)
        made = ctypes.c_void_p()
        self._check("ncclCommInitRank", ctypes.byref(made), group.ranks, unique, group.rank)
        self._communicator = made

    def all_reduce(self, source: torch.Tensor, destination: torch.Tensor, reduce: str, stream: int) -> None:
        """destination = the sum (or maximum) of all ranks' sources, contiguous; they may be one tensor."""
        memory = (source.data_ptr(), destination.data_ptr(), source.numel())
        self._check("ncclAllReduce", *memory, _dtype(source), _REDUCE[reduce], self._alive(), stream)

    def all_gather(self, source: torch.Tensor, destination: torch.Tensor, stream: int) -> None:
        """destination = all ranks' sources one after another, contiguous, in the order of the ranks."""
        memory = (source.data_ptr(), destination.data_ptr(), source.numel())
        self._check("ncclAllGather", *memory, _dtype(source), self._alive(), stream)

    def end(self) -> None:
        """Free whoever waits for a rank that does not come, once and for all. In a thread: NCCL waits in turn until the
        graphs that refer to the communicator are gone."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            abort = partial(self._library.ncclCommAbort, communicator)
            threading.Thread(target=abort, name="dsc nccl", daemon=True).start()

    def _alive(self) -> ctypes.c_void_p:
        if self._communicator is None:
            raise self._gone()
        return self._communicator

    def _gone(self) -> DscError:
        return DscError("the ranks of the engine do not reach each other any more", where=self._where)

    def _meet(self, group: Group) -> _UniqueId:
        """The communicator's name, which rank 0 makes up."""
        store, unique = group.store_of("nccl"), _UniqueId()
        if group.rank == 0:
            self._check("ncclGetUniqueId", ctypes.byref(unique))
            store.set("id", bytes(unique).hex())
            return unique
        return _UniqueId.from_buffer_copy(bytes.fromhex(store.get("id").decode()))

    def _version(self) -> str:
        """For example "2.28.9"."""
        number = ctypes.c_int()
        self._check("ncclGetVersion", ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            told = self._library.ncclGetErrorString(code).decode()
            raise DscError(f"{name} failed", where=self._where, got=told, try_="NCCL_DEBUG=INFO, which tells more")


def _dtype(tensor: torch.Tensor) -> int:
    return _DTYPES[str(tensor.dtype).removeprefix("torch.")]


def _load(where: str) -> Any:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DscError(
            "ranks on GPUs reach each other by NCCL, which is missing",
            where=where,
            wanted=LIBRARY,
            got=str(error),
            try_="a torch for CUDA from PyPI, which brings it",
        ) from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [ctypes.c_int], ctypes.c_char_p
    return library
