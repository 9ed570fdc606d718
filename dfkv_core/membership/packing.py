"""The msgpack of meta and small payloads: unsigned integers, booleans, bytes, text, arrays and maps of them."""

from __future__ import annotations

import struct
from typing import Any

_MAX_DEPTH = 8


class PackingError(ValueError):
    """Not what this module writes: malformed, of another type, or nested too deep."""


def pack(value: Any) -> bytes:
    """Shortest form. Raises TypeError for what has no form here."""
    out = bytearray()
    _pack(value, out)
    return bytes(out)


def unpack(data: bytes) -> Any:
    """The value that fills `data` exactly. Raises PackingError; takes no more memory than the data is large."""
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        raise PackingError(f"{len(data) - reader.at} bytes follow the value")
    return value


def _pack(value: Any, out: bytearray) -> None:
    if isinstance(value, bool):
        out.append(0xC3 if value else 0xC2)
    elif isinstance(value, int):
        _pack_uint(value, out)
    elif isinstance(value, str):
        data = value.encode()
        _head(len(data), out, fix=(0xA0, 32), sized=((0xD9, "B"), (0xDA, ">H"), (0xDB, ">I")))
        out += data
    elif isinstance(value, (bytes, bytearray, memoryview)):
        _head(len(value), out, fix=None, sized=((0xC4, "B"), (0xC5, ">H"), (0xC6, ">I")))
        out += value
    elif isinstance(value, (list, tuple)):
        _head(len(value), out, fix=(0x90, 16), sized=((0xDC, ">H"), (0xDD, ">I")))
        for item in value:
            _pack(item, out)
    elif isinstance(value, dict):
        _head(len(value), out, fix=(0x80, 16), sized=((0xDE, ">H"), (0xDF, ">I")))
        for key, item in value.items():
            _pack(key, out)
            _pack(item, out)
    else:
        raise TypeError(f"{type(value).__name__} cannot be packed")


def _pack_uint(value: int, out: bytearray) -> None:
    if not 0 <= value < 1 << 64:
        raise TypeError(f"{value} is no unsigned integer of 64 bits")
    if value < 128:
        out.append(value)
        return
    for head, form in ((0xCC, "B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q")):
        if value < 1 << 8 * struct.calcsize(form):
            out.append(head)
            out += struct.pack(form, value)
            return


def _head(size: int, out: bytearray, *, fix: tuple[int, int] | None, sized: tuple[tuple[int, str], ...]) -> None:
    if fix is not None and size < fix[1]:
        out.append(fix[0] | size)
        return
    for head, form in sized:
        if size < 1 << 8 * struct.calcsize(form):
            out.append(head)
            out += struct.pack(form, size)
            return
    raise TypeError(f"a value of {size} entries or bytes is too large")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise PackingError(f"nested deeper than {_MAX_DEPTH}")
        head = self.take(1)[0]
        if head < 0x80:
            return head
        if head < 0x90:
            return self.map(head & 15, depth)
        if head < 0xA0:
            return self.array(head & 15, depth)
        if head < 0xC0:
            return self.text(head & 31)
        if head in (0xC2, 0xC3):
            return head == 0xC3
        if head in _NUMBERS:
            return self.number(_NUMBERS[head])
        if head in _SIZED:
            kind, form = _SIZED[head]
            size = self.number(form)
            if kind == "text":
                return self.text(size)
            if kind == "bytes":
                return self.take(size)
            return self.array(size, depth) if kind == "array" else self.map(size, depth)
        raise PackingError(f"byte {head:#04x} starts nothing that is used here")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise PackingError(f"{size} bytes are announced, {len(self.data) - self.at} are there")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self, size: int) -> str:
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise PackingError("text that is not UTF-8") from None

    def array(self, size: int, depth: int) -> list[Any]:
        if size > len(self.data) - self.at:
            raise PackingError("an array announces more entries than there are bytes")
        return [self.value(depth + 1) for _ in range(size)]

    def map(self, size: int, depth: int) -> dict[Any, Any]:
        if 2 * size > len(self.data) - self.at:
            raise PackingError("a map announces more entries than there are bytes")
        out = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if not isinstance(key, (int, str)) or key in out:
                raise PackingError("a map has a key twice, or one that is no number and no text")
            out[key] = self.value(depth + 1)
        return out


_NUMBERS = {0xCC: "B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_SIZED = {
    0xC4: ("bytes", "B"),
    0xC5: ("bytes", ">H"),
    0xC6: ("bytes", ">I"),
    0xD9: ("text", "B"),
    0xDA: ("text", ">H"),
    0xDB: ("text", ">I"),
    0xDC: ("array", ">H"),
    0xDD: ("array", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}
