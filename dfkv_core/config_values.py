"""Value types of the configuration: sizes, addresses, lists, and where a field says it holds a secret."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

DEFAULT_PORT = 7440
MDS_PORT = 7441
ETCD_PORT = 2379
_SIZE = re.compile(r"^\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*$")
_UNITS = {
    "": 1,
    "b": 1,
    "k": 1024,
    "kib": 1024,
    "kb": 1000,
    "m": 1024**2,
    "mib": 1024**2,
    "mb": 1000**2,
    "g": 1024**3,
    "gib": 1024**3,
    "gb": 1000**3,
    "t": 1024**4,
    "tib": 1024**4,
    "tb": 1000**4,
}


def parse_size(value: Any) -> Any:
    """Bytes from a number or a text such as "4GiB", "512 MB" or "64k". ValueError says what was expected."""
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError('a number of bytes or a size such as "4GiB", "512MiB" or "64KiB"')
    return int(float(match.group(1)) * unit) if "." in match.group(1) else int(match.group(1)) * unit


def format_size(size_bytes: int) -> str:
    """A size for people, with the largest binary unit that keeps three digits: 1.50 GiB."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{int(value)} B" if unit == "B" else f"{_digits(value)} {unit}"
        value /= 1024
    return f"{_digits(value)} TiB"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def exact_size(size_bytes: int) -> str:
    """A size that parse_size() reads back to the same number: "4GiB", or plain bytes where no unit fits."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def split_address(address: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """(host, port) of "host", "host:port" or "[v6]:port". ValueError says what was expected."""
    expected = 'an address such as "127.0.0.1:7440", "cache-1:7440" or "[::1]:7440"'
    text = address.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(expected)
        port = rest[1:]
    else:
        host, _, port = text.partition(":")
    if not host or any(c.isspace() for c in host) or ":" in port:
        raise ValueError(expected)
    if not port:
        return host, default_port
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(expected)
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_address(address: str) -> str:
    return join_address(*split_address(address))


def _check_mds_address(address: str) -> str:
    return join_address(*split_address(address, MDS_PORT))


def _check_etcd_address(address: str) -> str:
    return join_address(*split_address(address.removeprefix("http://"), ETCD_PORT))


def _split_list(value: Any) -> Any:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _reject_bool(value: Any) -> Any:
    # bool is an int to Python; `ram_bytes = true` is a mistake, not one byte.
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _expand_path(value: Any) -> Any:
    return Path(value).expanduser() if isinstance(value, (str, Path)) else value


Size = Annotated[int, BeforeValidator(parse_size), BeforeValidator(_reject_bool)]
Count = Annotated[int, BeforeValidator(_reject_bool)]
Address = Annotated[str, AfterValidator(_check_address)]
AddressList = Annotated[tuple[Address, ...], BeforeValidator(_split_list)]
MdsAddressList = Annotated[tuple[Annotated[str, AfterValidator(_check_mds_address)], ...], BeforeValidator(_split_list)]
EtcdAddressList = Annotated[
    tuple[Annotated[str, AfterValidator(_check_etcd_address)], ...], BeforeValidator(_split_list)
]
TextList = Annotated[tuple[str, ...], BeforeValidator(_split_list)]
FilePath = Annotated[Path, BeforeValidator(_expand_path)]
PathList = Annotated[tuple[FilePath, ...], BeforeValidator(_split_list)]


def display(value: Any, *, size: bool = False) -> str:
    """One value as text for people. Empty lists and None read as "-"."""
    if value is None or value == () or value == "":
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if size and isinstance(value, int):
        return exact_size(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(str(item) for item in value)
    return str(value)
