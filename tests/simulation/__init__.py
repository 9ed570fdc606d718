"""Membership in virtual time: the service's own decisions, a model of etcd and of the network, faults, and checkers.

Everything follows from one seed. tests/unit/test_simulation.py runs histories in the gate, tools/torture.py many more.
"""
