"""A live node against peers that mean harm: it lives, its memory stays bounded, and other clients hardly notice."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import statistics
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from dfkv_core.client import Client, Item
from tests.integration import hostile
from tests.integration.serve_process import ServeProcess, clean_environ, serving
from tests.reference.frames import OPCODES, Frame, encode, header, item_table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_MS = 10_000.0
DESCRIPTOR = struct.pack("<HI", 1, 6) + b"victim"
OBJECT_BYTES = 64 * 1024
MIB = 1024 * 1024
# At most double is promised; this is what a noisy machine may add to the medians of a few short rounds.
NOISE = 2.0
# A round trip that has to wait for another thread's turn once takes about this: below it, what a ratio tells of is the kernel.
ONE_TURN_S = 0.0015
HALF_OPEN = 10_000
ROUNDS = 3
# What the attackers store must not push out what the victim reads.
LIMITS = {"DFKV_NODE__HANDSHAKE_TIMEOUT_MS": "2000", "DFKV_NODE__MAX_OBJECT_BYTES": "1MiB"}


def memory_bytes(server: ServeProcess, name: str = "VmRSS") -> int:
    for line in Path(f"/proc/{server.pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


class Victim:
    """An ordinary client with objects of its own, which it checks."""

    def __init__(self, server: ServeProcess, rng: random.Random) -> None:
        self.client = Client.open([server.address])
        self.namespace = self.client.add_namespace(DESCRIPTOR)
        self.ids = [rng.randbytes(16) for _ in range(8)]
        self.stored = [rng.randbytes(OBJECT_BYTES) for _ in self.ids]
        self.memory = [bytearray(OBJECT_BYTES) for _ in self.ids]
        items = [Item(block, 0, data) for block, data in zip(self.ids, self.stored, strict=True)]
        assert self.client.put(self.namespace, items, deadline_ms=DEADLINE_MS).ok
        self.batch = [Item(block, 0, memory) for block, memory in zip(self.ids, self.memory, strict=True)]

    def use(self) -> float:
        """Looks everything up and reads one object. Returns the seconds that took."""
        start = time.perf_counter()
        assert self.client.lookup(self.namespace, self.ids, [0], deadline_ms=DEADLINE_MS, lease_ms=0).prefix == 8
        assert self.client.get(self.namespace, self.batch[:1], deadline_ms=DEADLINE_MS).ok
        return time.perf_counter() - start

    def p99(self, seconds: float) -> float:
        end = time.monotonic() + seconds
        times = []
        while time.monotonic() < end:
            times.append(self.use())
            time.sleep(0.0005)
        return statistics.quantiles(times, n=100)[98]

    def check(self) -> None:
        for memory in self.memory:
            memory[:] = bytes(OBJECT_BYTES)
        assert self.client.get(self.namespace, self.batch, deadline_ms=DEADLINE_MS).ok
        assert [bytes(memory) for memory in self.memory] == self.stored

    def stats(self) -> dict[str, int]:
        (stats,) = self.client.node_stats(deadline_ms=DEADLINE_MS).values()
        assert stats is not None
        return stats


@pytest.fixture
def seed() -> int:
    chosen = random.SystemRandom().getrandbits(32)
    print(f"seed {chosen}")
    return chosen


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    with serving(tmp_path / "serve.log", **LIMITS) as process:
        yield process
        assert process.process.poll() is None, process.log.read_text()
        assert process.stop()[0] == 0


@pytest.fixture
def victim(server: ServeProcess, seed: int) -> Iterator[Victim]:
    made = Victim(server, random.Random(seed))
    yield made
    made.client.close()


@contextlib.contextmanager
def attacker(server: ServeProcess, kind: str, seed: int) -> Iterator[Callable[[float], Callable[[], dict[str, int]]]]:
    """A process that attacks for some seconds whenever it is told; the call that tells it returns one that waits."""
    command = [sys.executable, "-m", "tests.integration.hostile", str(server.ready["port"]), kind, str(seed)]
    with subprocess.Popen(
        command, cwd=ROOT, env=clean_environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        commands, answers = process.stdin, process.stdout

        def attack(seconds: float) -> Callable[[], dict[str, int]]:
            commands.write(f"{seconds}\n")
            commands.flush()

            def wait() -> dict[str, int]:
                line = answers.readline()
                assert line, "the attacker failed"
                done: dict[str, int] = json.loads(line)
                return done

            return wait

        try:
            attack(0)()  # is up
            yield attack
            commands.close()
            process.wait(20)
        finally:
            process.kill()


def at_rest(victim: Victim) -> None:
    """Soon after the attack the node holds nothing of it."""
    end = time.monotonic() + 10
    while True:
        stats = victim.stats()
        names = ("pins", "leases", "filling", "condemned", "request_bytes")
        left = {name: stats[name] for name in names if stats[name]}
        mine = 1 + victim.client.stats()["nodes"][0]["connections"]  # the view's too
        if not left and stats["connections_open"] <= mine:
            return
        assert time.monotonic() < end, (left, stats["connections_open"])
        time.sleep(0.05)


def test_mutated_frames_harm_nobody(server: ServeProcess, victim: Victim, seed: int) -> None:
    """Each kind of frame that is wrong, many times over."""
    rng = random.Random(seed)
    before = memory_bytes(server)
    done: Counter[str] = Counter()
    # A hundred times each; under the profile of torture, thousands.
    for number in range(hypothesis.settings().max_examples * len(hostile.CASES)):
        name = list(hostile.CASES)[number % len(hostile.CASES)]
        hostile.attack_once(server.ready["port"], hostile.CASES[name](rng), rng)
        done[name] += 1
        if number % 50 == 0:
            victim.check()
    at_rest(victim)
    victim.check()
    after = memory_bytes(server, "VmHWM")
    stats = victim.stats()
    print(f"memory of the node: {before / MIB:.1f} MiB before, at most {after / MIB:.1f} MiB; {dict(done)}")
    print({name: value for name, value in stats.items() if "fault" in name and value})
    assert after - before < 64 * MIB
    assert stats["meta_faults"] > 50
    assert stats["protocol_faults"] > 50
    assert stats["requests_unknown"] > 5
    assert all(stats[f"frame_faults_{fault}"] for fault in ("magic", "crc", "meta_limit", "payload_limit", "flags"))
    # Its objects are the attacker's own, and none of the 2 GiB that it announced is among them.
    assert victim.client.stats()["keys"]["get"].keys() == {"ok"}


@pytest.mark.parametrize("kind", list(hostile.ATTACKS))
def test_another_clients_p99_at_most_doubles(
    tmp_path: Path, server: ServeProcess, victim: Victim, seed: int, kind: str
) -> None:
    """Baseline: the same attack on another node of this machine, so that both phases share the processor alike."""
    seconds = 0.8
    pairs = []
    with (
        serving(tmp_path / "decoy.log", **LIMITS) as decoy,
        attacker(decoy, kind, seed) as harmless,
        attacker(server, kind, seed) as harmful,
    ):
        victim.p99(0.2)
        for turn in range(ROUNDS):
            measured = {}
            # Turn and turn about, so that a slow spell of the machine does not fall on one of them alone.
            for attack in (harmless, harmful) if turn % 2 else (harmful, harmless):
                wait = attack(seconds)
                time.sleep(0.1)
                measured[attack] = victim.p99(seconds - 0.2)
                assert sum(wait().values()) > 3
            pairs.append((measured[harmless], measured[harmful]))
        victim.check()
    calm, attacked = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"{kind}: p99 {calm * 1e3:.2f} ms, under attack {attacked * 1e3:.2f} ms: {attacked / calm:.2f} times")
    print(f"memory of the node: at most {memory_bytes(server, 'VmHWM') / MIB:.1f} MiB")
    assert attacked < 2 * NOISE * max(calm, ONE_TURN_S), pairs
    at_rest(victim)


def test_ten_thousand_half_open_connections(tmp_path: Path, seed: int) -> None:
    """They do not keep newcomers out: the oldest make way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = HALF_OPEN + 500
    if hard < wanted and hard != resource.RLIM_INFINITY:
        pytest.skip(f"this process may open {hard} descriptors; {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    peers: list[socket.socket] = []
    stack = contextlib.ExitStack()
    try:
        # Longer than all of this takes: none of them goes for having taken too long.
        server = stack.enter_context(serving(tmp_path / "serve.log", DFKV_NODE__HANDSHAKE_TIMEOUT_MS="120000"))
        victim = Victim(server, random.Random(seed))
        stack.callback(victim.client.close)
        before = memory_bytes(server)
        start = time.monotonic()
        for number in range(HALF_OPEN):
            peers.append(hostile.connect(server.ready["port"]))
            if number % 3 == 0:
                with contextlib.suppress(OSError):  # it was closed already
                    peers[-1].send(hostile.hello()[: 1 + number % 31])
            if number % 500 == 0:
                victim.use()
        opened_s = time.monotonic() - start
        # A newcomer gets in at once, although more connections are half open than the node serves.
        with Client.open([server.address]) as newcomer:
            namespace = newcomer.add_namespace(DESCRIPTOR)
            assert newcomer.lookup(namespace, victim.ids, [0], deadline_ms=2000).prefix == 8
        victim.check()
        after = memory_bytes(server)
        stats = victim.stats()
        print(
            f"{HALF_OPEN} half-open connections in {opened_s:.1f} s: memory of the node {before / MIB:.1f} MiB, "
            f"then {after / MIB:.1f} MiB; open {stats['connections_open']}, shed {stats['connections_shed']}, "
            f"refused {stats['connections_refused']}"
        )
        assert after - before < 64 * MIB
        assert stats["connections_open"] <= 4096 + 1024
        assert stats["connections_shed"] > 1000
        for peer in peers:
            peer.close()
        at_rest(victim)
        assert server.stop()[0] == 0
    finally:
        for peer in peers:
            peer.close()
        stack.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_that_hold_what_they_may_share_one_budget(server: ServeProcess, victim: Victim) -> None:
    """Tables half sent, stores begun, answers not taken, on many connections: bounded for the node, not for each alone."""
    before = memory_bytes(server)
    rng = random.Random(1)
    table = item_table([(rng.randbytes(16), 0, 0, 4096)] * 16384)
    meta = {"ns": hostile.NAMESPACE}
    begun = b"".join(encode(Frame(OPCODES["PUT"], 0, number, meta=meta, payload=table)) for number in range(10, 22))
    announced = header(OPCODES["GET"], 4, 9, 0xFFFFFFFF, 0, 1 << 20) + bytes(1000)
    untaken = encode(Frame(OPCODES["STAT"], 4, 7, meta=meta)) * 400
    peers: list[socket.socket] = []
    try:
        for number in range(180):
            peers.append(hostile.connect(server.ready["port"]))
            peers[-1].settimeout(0.02 if number % 3 == 2 else 5.0)
            with contextlib.suppress(OSError):  # it takes no more
                peers[-1].sendall(hostile.introduction())
                peers[-1].sendall((begun + announced, announced, untaken)[number % 3])
        victim.check()
        used, stats = memory_bytes(server), victim.stats()
        print(
            f"memory of the node: {before / MIB:.1f} MiB, then {used / MIB:.1f} MiB; "
            f"shared by requests {stats['request_bytes'] / MIB:.1f} MiB, refused {stats['requests_busy']}"
        )
        # The budget, what the allocator keeps of freed tables, and answers that wait on each third connection.
        assert used - before < 2 * 256 * MIB + len(peers) * MIB // 3
        assert stats["requests_busy"] > 10
    finally:
        for peer in peers:
            peer.close()
    at_rest(victim)


def test_silent_peers_of_the_metrics_endpoint(tmp_path: Path) -> None:
    """They hold a few threads for a few seconds, and the node none the worse."""
    with serving(tmp_path / "serve.log", "--metrics-port", "0") as server, contextlib.ExitStack() as stack:
        port = int(str(server.ready["metrics_address"]).rpartition(":")[2])

        def scrape() -> bytes:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
                return bytes(reply.read())

        assert b"dfkv_node_objects 0.0" in scrape()
        before = len(list(Path(f"/proc/{server.pid}/task").iterdir()))
        silent = [stack.enter_context(hostile.connect(port)) for _ in range(100)]
        for number, peer in enumerate(silent):
            with contextlib.suppress(OSError):  # closed, for there are too many
                peer.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (number * 50))
        with Client.open([server.address]) as client:
            assert client.ping(deadline_ms=DEADLINE_MS)
        assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) <= before + 8
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                assert b"dfkv_node_objects 0.0" in scrape()
                break
            assert time.monotonic() < end
            time.sleep(0.2)
        assert "Traceback" not in server.log.read_text()
