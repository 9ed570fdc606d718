"""A soak: several real nodes that are killed, stopped and spoiled at random, clients that do everything at once, and a
recorder that knows every byte. `python -m tests.soak --seconds 300`; a short form is in tests/integration."""
