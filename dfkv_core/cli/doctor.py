"""`dfkv doctor`: what this machine offers, what is missing, and what that costs."""

from __future__ import annotations

import platform
import socket
import sys
from typing import NamedTuple

import typer

from dfkv_core.cli.output import JsonOption, print_json, print_table

OK, NOTE, FAIL = "ok", "note", "fail"


class Finding(NamedTuple):
    """One line of the report. note: works without it, and `advice` says what it costs. fail: dfkv cannot run."""

    check: str
    state: str
    found: str
    advice: str = ""


def doctor(as_json: JsonOption = False) -> None:
    """Check what this machine offers, and what is missing.

    Python, native module, CPU, memory, limits, io_uring, RDMA and CUDA
    libraries, loopback.

    Exits with 1 when something that dfkv cannot do without is missing.

    \b
    Examples:
      dfkv doctor
      dfkv doctor --json
    """
    findings = examine()
    failed = any(finding.state == FAIL for finding in findings)
    if as_json:
        print_json({"ok": not failed, "checks": [finding._asdict() for finding in findings]})
    else:
        print_table("", ("check", "state", "found", "advice"), findings)
    if failed:
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """Every check, in the order of the report. Read-only; takes well under a second."""
    return [
        _python(),
        _native(),
        *_cpu(),
        _memory(),
        _huge_pages(),
        _memlock(),
        _open_files(),
        _io_uring(),
        _verbs(),
        _cuda(),
        _loopback(),
    ]


def _python() -> Finding:
    good = (3, 10) <= sys.version_info[:2] < (3, 14)
    return Finding("python", OK if good else FAIL, platform.python_version(), "" if good else "use Python 3.10 to 3.13")


def _native() -> Finding:
    try:
        from dfkv_core import _native as native
    except ImportError as error:
        return Finding("native module", FAIL, str(error), "reinstall dfkv for this Python")
    return Finding("native module", OK, str(native.__file__))


def _cpu() -> list[Finding]:
    from dfkv_core import host

    flags = host.cpu_flags()
    wanted = ("crc32",) if "aarch64" in platform.machine() else ("sse4_2", "avx2", "sha_ni")
    missing = [flag for flag in wanted if flag not in flags]
    out = [Finding("cpu", OK, host.cpu_name())]
    if missing:
        out.append(Finding("cpu features", NOTE, f"without {', '.join(missing)}", "checksums and hashes are slower"))
    else:
        out.append(Finding("cpu features", OK, ", ".join(wanted)))
    return out


def _memory() -> Finding:
    from dfkv_core import host
    from dfkv_core.config_values import format_size

    available = host.available_memory_bytes()
    limit = host.cgroup_headroom_bytes()
    found = "unknown" if available is None else f"{format_size(available)} available"
    if limit is not None and limit == available:
        found += " (limit of the control group)"
    return Finding("memory", OK if available is not None else NOTE, found)


def _huge_pages() -> Finding:
    from dfkv_core import host
    from dfkv_core.config_values import format_size

    info = host.meminfo()
    free = info.get("HugePages_Free", 0) * info.get("Hugepagesize", 0)
    mode = host.transparent_huge_pages() or "not in this kernel"
    found = f"{format_size(free)} reserved and free; transparent: {mode}"
    if free or mode.startswith(("always", "madvise")):
        return Finding("huge pages", OK, found)
    return Finding("huge pages", NOTE, found, "more TLB misses; allow madvise or reserve pages")


def _memlock() -> Finding:
    from dfkv_core import host
    from dfkv_core.config_values import format_size

    limit = host.memlock_limit_bytes()
    if limit is None:
        return Finding("locked memory", OK, "unlimited")
    return Finding("locked memory", NOTE, format_size(limit), "RDMA needs ulimit -l unlimited")


def _open_files() -> Finding:
    from dfkv_core import host

    limit = host.open_files_limit()
    if limit >= 8192:
        return Finding("open files", OK, str(limit))
    return Finding("open files", NOTE, str(limit), "a node with thousands of clients needs ulimit -n 8192 or more")


def _io_uring() -> Finding:
    from dfkv_core import host

    state = host.io_uring_state()
    if state == "yes":
        return Finding("io_uring", OK, "allowed")
    return Finding("io_uring", NOTE, state, "disk I/O uses a thread pool instead")


def _verbs() -> Finding:
    from dfkv_core import host

    library = host.library_found("libibverbs.so.1")
    devices = host.rdma_devices()
    found = f"{library or 'no libibverbs'}; devices: {', '.join(devices) or 'none'}"
    if library and devices:
        return Finding("rdma", OK, found)
    return Finding("rdma", NOTE, found, "TCP is used")


def _cuda() -> Finding:
    from dfkv_core import host

    driver = host.library_found("libcuda.so.1")
    runtime = host.library_found("libcudart.so.12", "libcudart.so.13", "libcudart.so.11.0", "libcudart.so")
    found = f"driver: {driver or 'none'}; runtime: {runtime or 'none'}"
    return Finding("cuda", OK if driver else NOTE, found, "" if driver else "only host memory is used")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2) as client:
                accepted, _ = server.accept()
                with accepted:
                    accepted.settimeout(2)
                    client.sendall(b"dfkv")
                    if accepted.recv(4) != b"dfkv":
                        return Finding("loopback", FAIL, "bytes were lost", "check the network namespace")
    except OSError as error:
        return Finding("loopback", FAIL, str(error), "bring up the lo interface")
    return Finding("loopback", OK, "127.0.0.1 reachable")
