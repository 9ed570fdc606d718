"""From native operations to futures, for asyncio and for threads.

Every watched operation has a token; whoever takes the token from the native client calls what belongs to it. That may be
an event loop that watches the client's descriptor, or the one thread that waits natively when somebody asked for a
thread's future: callbacks do not care which.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dfkv_core import _native

T = TypeVar("T")
_IDLE_WAIT_MS = 60_000.0


class OperationFuture(Future[T]):
    """A future whose cancel() ends the operation: once it returns, nothing touches the caller's memory."""

    _operation: _native.Operation | None = None
    _cancelling = False

    def cancel(self) -> bool:
        if self._operation is not None and not self._operation.done():
            # The dispatching thread may be the first to see the end: it must not take it for a result.
            self._cancelling = True
            self._operation.cancel()
        return super().cancel()


class Completions:
    """Futures of one client. Any thread."""

    def __init__(self, native: _native.Client) -> None:
        self._native = native
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}  # futures each one waits for
        self._thread: threading.Thread | None = None
        self._closed = False

    def future(self, operation: _native.Operation, make: Callable[[_native.Operation], T]) -> OperationFuture[T]:
        """A thread's future of make(operation). `make` runs on the dispatching thread and must not block."""
        future: OperationFuture[T] = OperationFuture()
        future._operation = operation
        self._start_thread()

        def done() -> None:
            with contextlib.suppress(InvalidStateError):
                if future._cancelling:
                    future.cancel()
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    result = make(operation)
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        self._watch(operation, done)
        return future

    async def wait(self, operation: _native.Operation) -> None:
        """Waits on the running event loop. Cancelling the task ends the operation before this returns."""
        if operation.done():
            return
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def done() -> None:
            # The loop may have been closed meanwhile, and then nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        self._attach(loop)
        try:
            self._watch(operation, done)
            await woken
        finally:
            self._detach(loop)
            if not operation.done():
                operation.cancel()

    def stop(self) -> None:
        """Before the native client's close(), which wakes the thread for the last time."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """After the native client's close(): every operation has ended. Joins the thread."""
        with self._lock:
            thread = self._thread
        self.dispatch()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def dispatch(self, timeout_ms: float = 0) -> None:
        """Calls what belongs to the operations that have ended."""
        for token in self._native.take_completed(timeout_ms):
            with self._lock:
                callback = self._callbacks.pop(token, None)
            if callback is not None:
                callback()

    def _watch(self, operation: _native.Operation, callback: Callable[[], None]) -> None:
        token = next(self._tokens)
        with self._lock:
            self._callbacks[token] = callback
        self._native.watch(operation, token)

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is not None or self._closed:
                return
            # A daemon: a client that nobody closed does not hold up the end of the interpreter.
            self._thread = threading.Thread(target=self._run, name="dfkv-completions", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            self.dispatch(_IDLE_WAIT_MS)

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            waiting = self._loops.get(loop, 0)
            self._loops[loop] = waiting + 1
        if waiting == 0:
            loop.add_reader(self._native.completion_fd, self.dispatch)

    def _detach(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            waiting = self._loops[loop] - 1
            if waiting:
                self._loops[loop] = waiting
                return
            del self._loops[loop]
        loop.remove_reader(self._native.completion_fd)
