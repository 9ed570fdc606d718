"""Locks of lookups against an oracle: what is locked is leased, and what is not is given back, once."""

import random

import pytest

from dfkv_connectors.lmcache.locks import LockBook

LEASE_S = 10.0


def test_a_lease_is_given_back_with_its_last_key() -> None:
    book = LockBook()
    book.lock(["a", "b", "c"], [("n", 1), ("m", 2)], 0.0, LEASE_S)
    assert book.unlock(["a", "c", "never locked"], 1.0) == []
    assert book.locked_keys == 1
    assert book.unlock(["b"], 1.0) == [("n", 1), ("m", 2)]
    assert book.unlock(["b"], 1.0) == []
    assert book.locked_keys == 0


def test_what_nobody_unlocks_ends_with_its_time() -> None:
    book = LockBook()
    book.lock(["a"], [("n", 1)], 0.0, LEASE_S)
    book.lock(["a", "b"], [("n", 2)], 5.0, LEASE_S)
    # The first is over: this unlocks the second, and does not take the place of the first's unlock.
    assert book.unlock(["a"], 11.0) == []
    assert book.unlock(["b"], 11.0) == [("n", 2)]
    book.lock(["c"], [("n", 3)], 20.0, LEASE_S)
    book.lock(["d"], [("n", 4)], 31.0, LEASE_S)
    assert book.locked_keys == 1
    assert book.take_all() == [("n", 4)]
    assert book.locked_keys == 0
    assert book.unlock(["d"], 31.0) == []


@pytest.mark.parametrize("seed", range(20))
def test_random_locks(seed: int) -> None:
    generator = random.Random(seed)
    book = LockBook()
    locks: dict[int, list[int]] = {}  # lease -> keys, as looked up
    held: dict[int, int] = {}  # key -> times locked
    given_back: set[int] = set()
    pending: list[tuple[int, list[int]]] = []  # lookups whose keys are still to be unlocked, in pieces
    lease = 0
    for step in range(400):
        now_s = step * 1e-3
        if generator.random() < 0.5:
            lease += 1
            keys = generator.choices(range(12), k=generator.randint(1, 6))
            locks[lease] = keys
            book.lock(keys, [("node", lease)], now_s, LEASE_S)
            pending.append((lease, list(keys)))
            for key in keys:
                held[key] = held.get(key, 0) + 1
        elif pending:
            index = generator.randrange(len(pending))
            _, rest = pending[index]
            generator.shuffle(rest)
            part = [rest.pop() for _ in range(generator.randint(1, len(rest)))]
            if not rest:
                pending.pop(index)
            over = {number for _, number in book.unlock(part, now_s)}
            assert not over & given_back, f"seed {seed}: given back twice"
            given_back |= over
            for key in part:
                held[key] -= 1
        leased = {key for number, keys in locks.items() if number not in given_back for key in keys}
        assert {key for key, times in held.items() if times} <= leased, f"seed {seed}: locked without a lease"
        assert book.locked_keys == sum(held.values())
    for _, rest in pending:
        given_back |= {number for _, number in book.unlock(rest, 1.0)}
    assert given_back == set(locks), f"seed {seed}"
