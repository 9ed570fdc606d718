"""Who is in the cluster, as one interface that every kind of membership implements.

Embedded (this node alone), static (a fixed list), and remote: leases kept by a membership service.
"""

from __future__ import annotations

from dfkv_core.membership.base import Listener, Membership, MembershipError
from dfkv_core.membership.embedded import EmbeddedMembership
from dfkv_core.membership.static import StaticMembership
from dfkv_core.membership.view import NodeEntry, NodeState, View

__all__ = [
    "EmbeddedMembership",
    "Listener",
    "Membership",
    "MembershipError",
    "NodeEntry",
    "NodeState",
    "StaticMembership",
    "View",
]
