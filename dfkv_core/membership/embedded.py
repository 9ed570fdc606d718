"""Membership of one node: `dfkv serve` without any service beside it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace

from dfkv_core.membership.base import LocalMembership
from dfkv_core.membership.view import NodeEntry, NodeState, View


class EmbeddedMembership(LocalMembership):
    """A cluster that is this node alone. Revisions start at the time of day, so that a restart's are larger."""

    def __init__(self, *, start_revision: int | None = None) -> None:
        super().__init__()
        self._start_revision = time.time_ns() // 1_000_000 if start_revision is None else start_revision

    def join(self, entry: NodeEntry) -> None:
        cluster_id = hashlib.sha256(b"dfkv.embedded.1" + entry.id.encode()).digest()[:16]
        self._publish(lambda _: View(cluster_id, self._start_revision, (entry,)))

    def set_state(self, state: NodeState) -> None:
        def change(view: View | None) -> View:
            if view is None:
                raise RuntimeError("set_state() before join()")
            return replace(view, revision=view.revision + 1, nodes=(replace(view.nodes[0], state=state),))

        self._publish(change)
