"""What operations of the client come back with: a status per key, with its reason, and what the batch cost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, overload

from dfkv_core.keys import BLOCK_ID_BYTES, Status, StatusRange, unpack_statuses

if TYPE_CHECKING:
    from dfkv_core import _native


class Statuses(Sequence[Status]):
    """One status per key, in the order asked. Immutable. Any thread."""

    def __init__(self, raw: bytes) -> None:
        self._values = unpack_statuses(raw)

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> Status: ...
    @overload
    def __getitem__(self, index: slice) -> list[Status]: ...
    def __getitem__(self, index: int | slice) -> Status | list[Status]:
        if isinstance(index, slice):
            return [Status(value) for value in self._values[index]]
        return Status(self._values[index])

    def __iter__(self) -> Iterator[Status]:
        return map(Status, self._values)

    def __repr__(self) -> str:
        return f"Statuses({dict(self.reasons())})"

    @property
    def all_done(self) -> bool:
        """Every key ended well."""
        return all(value < 100 for value in self._values)

    def done(self) -> list[bool]:
        """Per key whether it ended well."""
        return [value < 100 for value in self._values]

    def reasons(self) -> Counter[str]:
        """How often each status occurs, by its label ("ok", "not_found", ...)."""
        return Counter(status.label for status in map(Status, self._values))

    def in_range(self, wanted: StatusRange) -> list[int]:
        """Positions of the keys whose status is of that kind."""
        return [i for i, status in enumerate(self) if status.range is wanted]


@dataclass(frozen=True)
class BatchResult:
    """A get, put or remove. payload_bytes counts the keys that ended well."""

    statuses: Statuses
    payload_bytes: int
    elapsed_us: int
    round_trips: int
    view_revision: int

    @property
    def ok(self) -> bool:
        """Every key ended well."""
        return self.statuses.all_done

    @classmethod
    def of(cls, operation: _native.Operation) -> BatchResult:
        """Of an operation that is done."""
        return cls(
            Statuses(operation.statuses()),
            operation.payload_bytes,
            operation.elapsed_us,
            operation.round_trips,
            operation.view_revision,
        )


class Lookup:
    """What a lookup found, and the leases that keep it. A context manager: leaving it gives the leases back.

    Pass it to get() in place of the namespace. Leases also end with their time and with the client. Any thread.
    """

    def __init__(
        self,
        namespace: bytes,
        block_ids: bytes,
        operation: _native.Operation,
        release: Callable[[Sequence[tuple[str, int]]], None],
        owners: Callable[[bytes, int], list[str] | None],
    ) -> None:
        self.namespace = namespace
        self.block_ids = block_ids
        self.statuses = Statuses(operation.statuses())
        self.prefix = operation.prefix
        """Leading chunks whose required parts are all there, over all owners."""
        self.elapsed_us = operation.elapsed_us
        self.view_revision = operation.view_revision
        self._leases = operation.leases()
        self._release = release
        self._owners = owners
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.block_ids) // BLOCK_ID_BYTES

    @property
    def prefix_block_ids(self) -> bytes:
        """The chunks of the prefix, 16 bytes each, joined."""
        return self.block_ids[: self.prefix * BLOCK_ID_BYTES]

    @property
    def leases(self) -> list[tuple[str, int]]:
        """(node id, lease id) that are held."""
        with self._lock:
            return list(self._leases)

    def owners(self) -> list[str] | None:
        """Node id of each chunk's owner under the view this lookup used; None when that view is no longer the
        client's."""
        return self._owners(self.block_ids, self.view_revision)

    def release(self) -> None:
        """Gives the leases back. Idempotent; does not block."""
        with self._lock:
            leases, self._leases = self._leases, []
        if leases:
            self._release(leases)

    def __enter__(self) -> Lookup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lookup(prefix={self.prefix} of {len(self)}, {dict(self.statuses.reasons())})"
