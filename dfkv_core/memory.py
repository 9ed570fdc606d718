"""Memory of the caller as segments (address, length): what the native client reads from and writes into.

Nothing here copies. Whoever holds segments keeps the buffer they came from alive. Any thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_CPU = 1
_CUDA_HOST = 3  # pinned host memory
_DEVICE_NAMES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed"}
_MAX_SEGMENTS_PER_BUFFER = 1 << 16


class Segment(NamedTuple):
    """A run of memory. Address 0 in a get: its bytes are verified and thrown away."""

    address: int
    length: int


class MemoryTypeError(TypeError):
    """The object is not memory that dfkv can reach. The message says what was found and what would do."""


class DeviceMemoryError(MemoryTypeError):
    """The memory is a device's. Copy it to host memory first."""


@dataclass(frozen=True)
class _Layout:
    """An array in memory; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    readonly: bool

    def segments(self) -> list[Segment]:
        """The runs in the order of the array's elements (last axis fastest)."""
        axes = [(n, stride) for n, stride in zip(self.shape, self.strides, strict=True) if n != 1]
        if any(n == 0 for n, _ in axes):
            return []
        run = self.item_bytes
        while axes and axes[-1][1] == run:
            run *= axes.pop()[0]
        addresses = [self.address]
        for n, stride in axes:
            if len(addresses) * n > _MAX_SEGMENTS_PER_BUFFER:
                raise MemoryTypeError(
                    f"an array of shape {self.shape} and strides {self.strides} falls into more than "
                    f"{_MAX_SEGMENTS_PER_BUFFER} runs; make it contiguous"
                )
            addresses = [base + i * stride for base in addresses for i in range(n)]
        return [Segment(address, run) for address in addresses]


def segments_of(buffer: Any, *, writable: bool) -> list[Segment]:
    """The memory of `buffer`, in order.

    Takes a (address, length) pair, an object with the buffer protocol, with __array_interface__ (numpy) or with
    __dlpack__ (torch and others) in host memory, or a list of those. Arrays may be strided: each contiguous run is
    a segment. writable: raises MemoryTypeError for memory that may only be read. DeviceMemoryError: not host memory.
    """
    if isinstance(buffer, tuple) and len(buffer) == 2 and all(isinstance(value, int) for value in buffer):
        address, length = buffer
        if address < 0 or length < 0 or address + length > 1 << 64:
            raise MemoryTypeError(f"({address}, {length}) is no address and length")
        return [Segment(address, length)]
    if isinstance(buffer, list):
        return [segment for each in buffer for segment in segments_of(each, writable=writable)]
    layout = _layout_of(buffer)
    if writable and layout.readonly:
        raise MemoryTypeError(f"a {type(buffer).__name__} that may only be read cannot receive data")
    return layout.segments()


def pack_segments(segments: Sequence[tuple[int, int]]) -> bytes:
    """Segments as the native client takes them: u64 address, u64 length each."""
    flat = [value for segment in segments for value in segment]
    return bytes((ctypes.c_uint64 * len(flat))(*flat))


def _layout_of(buffer: Any) -> _Layout:
    if hasattr(buffer, "__cuda_array_interface__"):
        raise DeviceMemoryError(f"a {type(buffer).__name__} in CUDA memory: copy it to host memory first")
    interface = getattr(buffer, "__array_interface__", None)
    if isinstance(interface, dict):
        return _from_array_interface(interface)
    if hasattr(buffer, "__dlpack_device__"):
        return _from_dlpack(buffer)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise MemoryTypeError(
            f"a {type(buffer).__name__} gives no memory: expected (address, length), the buffer protocol, "
            "__array_interface__ or __dlpack__"
        ) from None
    with view:
        return _from_memoryview(view)


def _from_memoryview(view: memoryview) -> _Layout:
    if view.nbytes == 0:
        return _Layout(0, (0,), (1,), 1, view.readonly)
    if view.shape is None or view.strides is None or view.suboffsets:
        raise MemoryTypeError("a buffer of pointers to rows gives no plain memory")
    return _Layout(_address_of(view), view.shape, view.strides, view.itemsize, view.readonly)


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_GET_BUFFER = ctypes.pythonapi.PyObject_GetBuffer
_GET_BUFFER.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_RELEASE_BUFFER = ctypes.pythonapi.PyBuffer_Release
_RELEASE_BUFFER.argtypes = [ctypes.POINTER(_PyBuffer)]
_RELEASE_BUFFER.restype = None
_PYBUF_STRIDES = 0x18


def _address_of(view: memoryview) -> int:
    # ctypes' own from_buffer() refuses memory that may only be read.
    raw = _PyBuffer()
    _GET_BUFFER(view, ctypes.byref(raw), _PYBUF_STRIDES)
    try:
        return int(raw.buf or 0)
    finally:
        _RELEASE_BUFFER(ctypes.byref(raw))


def _from_array_interface(interface: dict[str, Any]) -> _Layout:
    if interface.get("mask") is not None:
        raise MemoryTypeError("a masked array gives no plain memory")
    typestr = str(interface["typestr"])
    if typestr[1] in "OtV" and interface.get("descr") is None:
        raise MemoryTypeError(f"an array of {typestr} gives no plain memory")
    if typestr[1] == "O":
        raise MemoryTypeError("an array of Python objects gives no plain memory")
    item_bytes = int(typestr[2:])
    shape = tuple(int(n) for n in interface["shape"])
    strides = interface.get("strides")
    data = interface.get("data")
    if not isinstance(data, tuple):
        raise MemoryTypeError("an array without a data pointer gives no plain memory")
    if strides is None:
        strides = _contiguous_strides(shape, item_bytes)
    return _Layout(int(data[0]), shape, tuple(int(stride) for stride in strides), item_bytes, bool(data[1]))


def _contiguous_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    strides = []
    step = item_bytes
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_CAPSULE_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_CAPSULE_POINTER.argtypes = [ctypes.py_object, ctypes.c_char_p]
_CAPSULE_POINTER.restype = ctypes.c_void_p


def _from_dlpack(buffer: Any) -> _Layout:
    device, _ = buffer.__dlpack_device__()
    if int(device) not in (_CPU, _CUDA_HOST):
        name = _DEVICE_NAMES.get(int(device), f"device type {int(device)}")
        raise DeviceMemoryError(f"a {type(buffer).__name__} in {name} memory: copy it to host memory first")
    # The capsule is read and dropped unconsumed: its own destructor gives the export back, and the caller keeps
    # the tensor, hence the memory, alive.
    capsule = buffer.__dlpack__()
    address = _CAPSULE_POINTER(capsule, b"dltensor")
    tensor = ctypes.cast(ctypes.c_void_p(address), ctypes.POINTER(_DLTensor)).contents
    item_bits = tensor.dtype.bits * tensor.dtype.lanes
    if item_bits % 8:
        raise MemoryTypeError(f"elements of {item_bits} bits are no whole bytes")
    item_bytes = item_bits // 8
    shape = tuple(int(tensor.shape[i]) for i in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(int(tensor.strides[i]) * item_bytes for i in range(tensor.ndim))
    else:
        strides = _contiguous_strides(shape, item_bytes)
    return _Layout(int(tensor.data or 0) + int(tensor.byte_offset), shape, strides, item_bytes, readonly=False)
