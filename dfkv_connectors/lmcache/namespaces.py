"""Which namespace an object belongs to: models by name, read once, and their layouts. Any thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from dfkv_connectors.pending import Pending
from dfkv_core.config import LmcacheConnectorConfig

from .identity import Layout, ModelIdentity, ObjectKind, identify_model, object_descriptor

logger = logging.getLogger("lmcache.dfkv")

MOST_MODELS = 256
MOST_NAMESPACES = 4096
CHECK_S = 1.0


class Namespaces:
    """add: registers a descriptor under a label and returns its id."""

    def __init__(self, config: LmcacheConnectorConfig, add: Callable[[bytes, str], bytes], objects: ObjectKind) -> None:
        self._config = config
        self._add = add
        self._objects = objects
        self._lock = threading.Lock()
        self._models: dict[str, Pending[ModelIdentity]] = {}
        self._check_s: dict[str, float] = {}
        self._changed: set[str] = set()
        self._ids: dict[tuple[str, Layout], bytes] = {}
        self._refused: dict[tuple[str, Layout], str] = {}

    def is_read(self, name: str, limit_s: float = 0) -> bool:
        """Waits for the files of a model. Whether they have been read, as well as they can be."""
        model = self._model(name)
        if model is not None:
            model.wait(limit_s)
        return model is None or model.is_done

    def when_read(self, names: Iterable[str], call: Callable[[], None], limit_s: float) -> None:
        """Calls once: when the files of these models have been read, at once where they have, or after limit_s."""
        unread = [model for model in map(self._model, set(names)) if model is not None and not model.is_done]
        if not unread:
            call()
            return
        once = _Once(call)
        late = threading.Timer(limit_s, once)
        late.daemon = True
        late.start()
        step: Callable[[], None] = once
        for model in unread:
            step = _after(model, step)
        step()

    def find(self, name: str, layout: Layout) -> tuple[bytes | None, str]:
        """The namespace of a model whose files have been read, or None and why there is none."""
        pending = self._model(name)
        if pending is None:
            return None, f"more than {MOST_MODELS} models"
        model = pending.wait(0)
        if model is None:
            return None, pending.error or "its files are still being read"
        if not self._is_current(model):
            return None, "its files were changed while this server ran; restart it together with the engines"
        key = (name, layout)
        with self._lock:
            known = self._ids.get(key)
            if known is not None:
                return known, ""
            if key in self._refused:
                return None, self._refused[key]
            if len(self._ids) + len(self._refused) >= MOST_NAMESPACES:
                return None, f"more than {MOST_NAMESPACES} layouts"
            try:
                descriptor = object_descriptor(model, layout, self._config, self._objects)
            except Exception as error:
                self._refused[key] = str(error)
                return None, str(error)
            namespace = self._ids[key] = self._add(descriptor.encode(), name[:256])
        logger.info("dfkv: sharing objects of %s in namespace %s: %s", name, namespace.hex(), layout.describe())
        return namespace, ""

    def _model(self, name: str) -> Pending[ModelIdentity] | None:
        with self._lock:
            if name not in self._models and len(self._models) < MOST_MODELS:
                self._models[name] = Pending(lambda: identify_model(name, self._config))
            return self._models.get(name)

    def _is_current(self, model: ModelIdentity) -> bool:
        """Looks at the files once in a while; a model whose files have changed stays out."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._check_s.get(model.name, 0.0):
                return model.name not in self._changed
            self._check_s[model.name] = now_s + CHECK_S
        try:
            current = model.is_current()
        except OSError:
            current = False
        with self._lock:
            if not current:
                self._changed.add(model.name)
            return model.name not in self._changed


class _Once:
    """A call that several threads may make and one does."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._turn = threading.Lock()

    def __call__(self) -> None:
        if self._turn.acquire(blocking=False):
            self._call()


def _after(model: Pending[ModelIdentity], call: Callable[[], None]) -> Callable[[], None]:
    def wait() -> None:
        if not model.then(call):
            call()

    return wait
