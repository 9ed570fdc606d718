"""What this machine allows: memory, limits, libraries. Read-only probes, used before a start and by `dfkv doctor`."""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
from pathlib import Path

_IO_URING_SETUP = 425  # the same number on every architecture Linux runs dfkv on
_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def meminfo() -> dict[str, int]:
    """/proc/meminfo; sizes in bytes, counts (HugePages_*) as they are. Empty where it cannot be read."""
    out = {}
    for line in _lines(Path("/proc/meminfo")):
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields:
            out[name] = int(fields[0]) * (1024 if fields[1:] == ["kB"] else 1)
    return out


def available_memory_bytes() -> int | None:
    """Memory that can be had without swapping, under the container's limit too. None: unknown."""
    candidates = []
    info = meminfo()
    if "MemAvailable" in info:
        candidates.append(info["MemAvailable"])
    limit = cgroup_headroom_bytes()
    if limit is not None:
        candidates.append(limit)
    return min(candidates, default=None)


def cgroup_headroom_bytes() -> int | None:
    """Memory limit of this process's control group less what it uses. None: no limit, or unknown."""
    path = "/"
    for line in _lines(Path("/proc/self/cgroup")):
        number, controllers, name = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            path = name
    headrooms = []
    for root, limit_name, used_name in (
        (_CGROUP_V2, "memory.max", "memory.current"),
        (_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        # Inside a container the group's own directory is often mounted as the root.
        for directory in {root / path.lstrip("/"), root}:
            limit = _number(directory / limit_name)
            used = _number(directory / used_name)
            if limit is not None and used is not None and limit < 1 << 60:
                headrooms.append(max(0, limit - used))
    return min(headrooms, default=None)


def cpu_flags() -> set[str]:
    """CPU feature names as the kernel gives them."""
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(rest.split())
    return set()


def cpu_name() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, rest = line.partition(":")
        if name.strip() == "model name":
            return rest.strip()
    return platform.machine()


def transparent_huge_pages() -> str | None:
    """The chosen mode of transparent huge pages (always, madvise, never), and of shared memory. None: unknown."""
    modes = []
    for name in ("enabled", "shmem_enabled"):
        text = " ".join(_lines(Path("/sys/kernel/mm/transparent_hugepage") / name))
        if "[" in text:
            modes.append(text.partition("[")[2].partition("]")[0])
    return ", shared memory ".join(modes) if modes else None


def memlock_limit_bytes() -> int | None:
    """Soft limit of locked memory; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def open_files_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def io_uring_state() -> str:
    """ "yes", or why io_uring cannot be used. Asks the kernel with invalid arguments, so nothing is created."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(_IO_URING_SETUP, 0, None)
    code = ctypes.get_errno() if result < 0 else 0
    if code in (errno.EFAULT, errno.EINVAL):  # it looked at the arguments: the call itself is allowed
        return "yes"
    if code == errno.ENOSYS:
        return "no: not in this kernel, or filtered"
    if code in (errno.EPERM, errno.EACCES):
        return "no: forbidden here (container profile or sysctl kernel.io_uring_disabled)"
    return f"no: {errno.errorcode.get(code, code)}"


def library_found(*names: str) -> str | None:
    """The first of the shared libraries that the dynamic loader finds; None: none of them."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def rdma_devices() -> list[str]:
    root = Path("/sys/class/infiniband")
    return sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None
