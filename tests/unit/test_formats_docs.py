"""docs/formats.md says what the formats are: numbers in its tables and the bytes of its worked example."""

from __future__ import annotations

import re
from pathlib import Path

from dfkv_core import keys
from dfkv_core.kv_formats import KV_FORMATS
from dfkv_core.namespace import TAG_NAMES, GroupKind, HashAlgorithm, ShardScheme
from tests.golden import traffic, vectors
from tests.reference import frames, identity, storage, views

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()


def section(title: str) -> str:
    """Text below one heading, up to the next."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def numbered(text: str) -> dict[str, int]:
    """Rows `| number | name | ...` of a table."""
    return {name: int(number) for number, name in re.findall(r"^\| (\d+) \| (\w+) \|", text, re.MULTILINE)}


def test_opcodes() -> None:
    cells = re.findall(r"\| (\d+) \| ([A-Z_]+) (?=\|)", section("Frame"))
    assert {name: int(number) for number, name in cells} == frames.OPCODES


def test_meta_keys() -> None:
    assert numbered(section("HELLO, both ways")) == frames.HELLO_KEYS
    assert numbered(section("Requests")) == frames.REQUEST_KEYS
    assert numbered(section("Replies")) == frames.REPLY_KEYS


def test_statuses() -> None:
    assert numbered(section("Status")) == {status.label: int(status) for status in keys.Status}


def test_namespace() -> None:
    text = section("Namespace, 16 bytes")
    tags = {name: number for name, number in numbered(text).items() if name in TAG_NAMES.values()}
    assert tags == {name: tag for tag, name in TAG_NAMES.items()}
    formats = re.findall(r"^\| (\d+) \| (dfkv|vllm|sglang|lmcache) \| (\w+)", text, re.MULTILINE)
    assert formats == [(str(entry.number), entry.engine_family, entry.backend) for entry in KV_FORMATS.values()]
    for title, kind in (("Kinds of groups", GroupKind), ("Algorithms", HashAlgorithm), ("Shard schemes", ShardScheme)):
        found = re.search(rf"- {title}: (.*?)\n(?=-|\n)", text, re.DOTALL)
        assert found
        assert [int(number) for number in re.findall(r"\b(\d+) [A-Za-z]", found[1])] == [*map(int, kind)]


def test_view_and_record() -> None:
    assert numbered(section("View of the cluster")) == {name: key for name, key, _ in views.NODE_FIELDS}
    rows = re.findall(
        r"^\| (\d+) \| ([\d, ]+) \| ", section("Slot table on disk").split("field of a record")[1], re.MULTILINE
    )
    places = []
    for offset, sizes in rows:
        at = int(offset)
        for size in map(int, sizes.split(",")):
            places.append((at, size))
            at += size
    assert places == [(0, 4), *((at, size) for _, at, size in storage.RECORD_FIELDS), (108, 20)]


def test_worked_example() -> None:
    text = section("Worked example")
    digits = re.sub(r"\s", "", re.sub(r"  +[a-z\"].*", "", text))
    descriptor = identity.descriptor_of(vectors.namespace_values()["minimal"])
    assert descriptor.hex()[: 2 * (10 + 10 + 10)] in digits
    assert identity.namespace_id(descriptor).hex() in text
    start = identity.chain_start()
    after = identity.chain_next(start, [1, 2, 3, 4], [(2, b"salt")])
    assert start.hex() in text
    assert after.hex() in text
    assert f"{identity.route(after[:16]):#018x}" in text
    assert f"{identity.part(0, 0, 0, 0, 1, 2):#018x}" in text
    for name in ("ping_client", "ping_server"):
        (frame,) = traffic.streams()[name]
        assert frames.encode(frame).hex() in digits
