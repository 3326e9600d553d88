"""The CUDA driver calls that running an engine needs, each checked. Tensors and streams are torch's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from dsc.runtime.errors import DscError

try:
    from cuda.bindings import driver as cu
except ImportError as error:  # the GPU extra is not installed
    raise DscError("running on a GPU needs cuda-bindings", try_="pip install 'dsc[gpu]'") from error

_MAP_DTYPES = {
    "float32": "FLOAT32", "bfloat16": "BFLOAT16", "uint8": "UINT8", "int8": "UINT8", "float8_e4m3fn": "UINT8",
    "int32": "INT32", "int64": "INT64",
}  # fmt: skip


def check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call; DscError with the driver's own words where it failed."""
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        _, text = cu.cuGetErrorString(result[0])
        raise DscError(f"{what} failed", got=f"{result[0].name}: {text.decode() if text else ''}")
    values = result[1:]
    return values[0] if len(values) == 1 else values


class Library:
    """A loaded cubin. Keep it as long as its functions are used."""

    def __init__(self, cubin: bytes, name: str) -> None:
        self.name = name
        self._cubin = cubin
        self._library = check(cu.cuLibraryLoadData(cubin, None, None, 0, None, None, 0), f"loading {name}")
        self._functions: dict[str, Any] = {}

    def function(self, entry: str, shared_bytes: int) -> Any:
        """A kernel, allowed at least this much dynamic shared memory."""
        kernel = check(cu.cuLibraryGetKernel(self._library, entry.encode()), f"finding {entry} in {self.name}")
        if shared_bytes > 16 * 1024:  # static and dynamic memory together are free up to 48 KiB
            device = check(cu.cuCtxGetDevice(), "asking for the device")
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuKernelSetAttribute(attribute, shared_bytes, kernel, device), f"{entry}: {shared_bytes} B shared")
        if entry not in self._functions:
            self._functions[entry] = check(cu.cuKernelGetFunction(kernel), f"preparing {entry}")
        return self._functions[entry]


def launch_config(
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    cluster: Sequence[int],
    pdl: bool,
    cooperative: bool,
) -> Any:
    """A launch configuration without its stream."""
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    attributes = []
    if tuple(cluster) != (1, 1, 1):
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = attribute.value.clusterDim
        dim.x, dim.y, dim.z = cluster
        attributes.append(attribute)
    if pdl:
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cooperative:
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def launch(config: Any, function: Any, arguments: Any, stream: int, entry: str) -> None:
    """Launch on a stream (torch's `cuda_stream` number). `arguments` is an array of pointers to argument values."""
    config.hStream = stream
    (code,) = cu.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0)
    if code != cu.CUresult.CUDA_SUCCESS:
        check((code,), f"launching {entry}")


def tensor_map(
    dtype: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    l2_bytes: int,
    nan_outside: bool,
) -> Any:
    """A TMA descriptor; see `dsc.runtime.steps.TensorMap`."""
    u64, u32 = cu.cuuint64_t, cu.cuuint32_t
    fill = cu.CUtensorMapFloatOOBfill
    return check(
        cu.cuTensorMapEncodeTiled(
            getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_DTYPES[dtype]}"),
            len(dims),
            address,
            [u64(d) for d in dims],
            [u64(s) for s in strides],
            [u32(b) for b in box],
            [u32(1)] * len(dims),
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{swizzle}B' if swizzle else 'NONE'}"),
            getattr(
                cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{l2_bytes}B' if l2_bytes else 'NONE'}"
            ),
            fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
            if nan_outside
            else fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "making a tensor map",
    )
