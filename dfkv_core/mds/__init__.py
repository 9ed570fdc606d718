"""The membership service (`dfkv mds`): who is in the cluster, kept in etcd and told to nodes and clients.

Decisions are functions without I/O or clock (guard, registry); etcd.py is the only file that talks to etcd.
"""
