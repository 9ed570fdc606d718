"""Weights that change under a running engine. SGLang tells its storage nothing of it, so its updaters are watched."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

# (module, class) whose methods put new values into a loaded model, oldest version last.
_UPDATERS = (
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"),
    ("sglang.srt.model_executor.model_runner", "ModelRunner"),
)
_METHODS = ("update_weights", "load_weights", "begin_weight_update")
_MARK = "_dfkv_watched"

_lock = threading.Lock()
_updates = 0


def updates() -> int:
    """Updates of weights that have begun in this process since watch() was called first: after one, what the model's files
    hold says nothing about its KV."""
    return _updates


def watch() -> bool:
    """Wraps the updaters of this process, once. False: it runs models, and none of their updaters is known."""
    runs_models = False
    found = False
    for module_name, class_name in _UPDATERS:
        module = sys.modules.get(module_name)
        if module is None:
            continue
        runs_models = True
        updater = getattr(module, class_name, None)
        for name in list(vars(updater)) if updater is not None else ():
            method = vars(updater)[name]
            if name.startswith(_METHODS) and callable(method):
                found = True
                if not hasattr(method, _MARK):
                    setattr(updater, name, _watched(method))
    return found or not runs_models


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def update(*args: Any, **kwargs: Any) -> Any:
        global _updates
        with _lock:
            _updates += 1  # before the first tensor changes
        return method(*args, **kwargs)

    setattr(update, _MARK, True)
    return update
