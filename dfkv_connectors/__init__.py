"""Connectors: each translates one engine's paged KV layout into keys and segments, and nothing else."""
