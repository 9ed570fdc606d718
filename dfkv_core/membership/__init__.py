"""Who is in the cluster, as one interface that every kind of membership implements.

Embedded (this node alone) and static (a fixed list) are built here; a lease-keeping service fits the same interface.
"""

from __future__ import annotations

from dfkv_core.membership.base import Listener, Membership
from dfkv_core.membership.embedded import EmbeddedMembership
from dfkv_core.membership.static import StaticMembership
from dfkv_core.membership.view import NodeEntry, NodeState, View

__all__ = [
    "EmbeddedMembership",
    "Listener",
    "Membership",
    "NodeEntry",
    "NodeState",
    "StaticMembership",
    "View",
]
