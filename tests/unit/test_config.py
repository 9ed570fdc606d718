"""Configuration: precedence, provenance, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from dfkv_core import config_load
from dfkv_core.config import (
    RECORDS,
    ClientConfig,
    ConfigError,
    NodeConfig,
    VllmConnectorConfig,
    is_loopback,
    load_config,
    read_secret,
    split_address,
)
from dfkv_core.config_values import exact_size, format_size, parse_size


@pytest.fixture(autouse=True)
def no_machine_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The configuration of the machine that runs the tests must not matter."""
    monkeypatch.setattr(config_load, "SYSTEM_FILE", tmp_path / "none" / "dfkv.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_are_usable_and_marked() -> None:
    loaded = load_config(ClientConfig, environ={})
    assert loaded.value.seeds == [("127.0.0.1", 7440)]
    assert set(loaded.sources.values()) == {"default"}
    node = load_config(NodeConfig, environ={}).value
    assert (node.host, node.port, node.metrics_port) == ("127.0.0.1", 7440, None)


def test_precedence_file_environment_flags(tmp_path: Path) -> None:
    file = write(tmp_path / "d.toml", '[node]\nport = 1\nthreads = 3\nram_bytes = "2GiB"\nnode_id = "file"\n')
    environ = {"DFKV_NODE__PORT": "2", "DFKV_NODE__THREADS": "4"}
    loaded = load_config(NodeConfig, flags={"port": 5, "node_id": None}, environ=environ, file=file)
    assert (loaded.value.port, loaded.value.threads, loaded.value.ram_bytes) == (5, 4, 2 << 30)
    assert loaded.value.node_id == "file", "None means: not given"
    assert loaded.sources["port"] == "flags"
    assert loaded.sources["threads"] == "environment DFKV_NODE__THREADS"
    assert loaded.sources["ram_bytes"] == f"file {file} [node]"
    assert loaded.sources["host"] == "default"


def test_user_file_overrides_system_file_and_named_file_replaces_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_load, "SYSTEM_FILE", write(tmp_path / "etc.toml", "[node]\nport = 1\nthreads = 9\n"))
    write(tmp_path / "home" / "dfkv" / "dfkv.toml", "[node]\nport = 2\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "home")}
    value = load_config(NodeConfig, environ=environ).value
    assert (value.port, value.threads) == (2, 9)
    named = write(tmp_path / "named.toml", "[node]\nport = 3\n")
    value = load_config(NodeConfig, environ={**environ, "DFKV_CONFIG": str(named)}).value
    assert (value.port, value.threads) == (3, 2)


def test_connector_takes_client_keys_from_either_section(tmp_path: Path) -> None:
    file = write(
        tmp_path / "d.toml",
        '[client]\naddresses = ["a:1", "b"]\nname = "shared"\n[vllm]\nname = "own"\nmin_restore_tokens = 64\n',
    )
    loaded = load_config(
        VllmConnectorConfig,
        "vllm",
        flags={"chunk_bytes": "1MiB"},
        flags_source="kv_connector_extra_config",
        environ={"DFKV_CLIENT__LEASE_MS": "7"},
        file=file,
    )
    assert loaded.value.seeds == [("a", 1), ("b", 7440)]
    assert (loaded.value.name, loaded.value.min_restore_tokens, loaded.value.lease_ms) == ("own", 64, 7)
    assert loaded.sources["chunk_bytes"] == "kv_connector_extra_config"
    # A client alone does not see what is said to the connector.
    assert load_config(ClientConfig, environ={}, file=file).value.name == "shared"


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ({"rambytes": 1}, {}, ["rambytes", "flags", "unknown key", '"ram_bytes"']),
        ({"ram_bytes": "4 GoB"}, {}, ["node.ram_bytes", '"4 GoB"', "4GiB"]),
        ({}, {"DFKV_NODE__PROT": "1"}, ["node.prot", "environment DFKV_NODE__PROT", '"port"']),
        ({}, {"DFKV_NOD__PORT": "1"}, ["DFKV_NOD__PORT", "unknown section", '"node"']),
        ({}, {"DFKV_NODE_PORT": "1"}, ["DFKV_NODE_PORT", '"DFKV_NODE__PORT"']),
        ({"port": 70000}, {}, ["node.port", "70000", "65535"]),
        ({"insecure": "perhaps"}, {}, ["node.insecure", "true or false"]),
        ({"threads": True}, {}, ["node.threads", "a number"]),
        ({"host": "0.0.0.0"}, {}, ["secret_file", "0.0.0.0", "insecure"]),
        ({"node_id": "a/b"}, {}, ["node_id", "letters"]),
        ({"peers": ["a=h:1"], "node_id": "b"}, {}, ["peers", "'b'"]),
        ({"peers": ["a=h:1", "a=h:2"], "node_id": "a"}, {}, ["peers", "distinct"]),
    ],
)
def test_errors_say_key_source_found_expected(
    flags: dict[str, object], environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(NodeConfig, flags=flags, environ=environ)
    for word in words:
        assert word in str(caught.value)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(NodeConfig, flags={"port": -1, "threads": 0}, environ={})
    assert [problem.key for problem in caught.value.problems] == ["node.port", "node.threads"]


def test_unknown_keys_and_sections_in_files(tmp_path: Path) -> None:
    file = write(tmp_path / "d.toml", "[client]\nadresses = []\n[clinet]\nx = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(ClientConfig, environ={}, file=file)
    assert {(p.key, p.nearest) for p in caught.value.problems} == {
        ("client.adresses", "addresses"),
        ("[clinet]", "client"),
    }


def test_named_file_must_exist_and_parse(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        load_config(ClientConfig, environ={"DFKV_CONFIG": str(tmp_path / "missing.toml")})
    with pytest.raises(ConfigError, match="TOML"):
        load_config(ClientConfig, environ={}, file=write(tmp_path / "bad.toml", "[client\n"))


def test_service_links_of_an_orchestrator_are_not_settings() -> None:
    loaded = load_config(NodeConfig, environ={"DFKV_NODE_PORT": "tcp://10.0.0.1:7440", "DFKV_SERVICE_HOST": "10.0.0.1"})
    assert loaded.value.port == 7440


def test_summary_is_one_line_with_sources_and_without_secrets(tmp_path: Path) -> None:
    loaded = load_config(VllmConnectorConfig, flags={"fleet_salt": "open-sesame"}, environ={"DFKV_CLIENT__NAME": "n"})
    summary = loaded.summary()
    assert "\n" not in summary
    assert "name=n (environment DFKV_CLIENT__NAME)" in summary
    assert "fleet_salt=*** (flags)" in summary
    assert "open-sesame" not in summary + str(loaded.as_dict())
    with pytest.raises(ConfigError) as caught:
        load_config(VllmConnectorConfig, flags={"fleet_salt": ["open-sesame"]}, environ={})
    assert "open-sesame" not in str(caught.value)


@pytest.mark.parametrize("name", list(RECORDS))
def test_every_key_is_described_and_its_default_survives_the_environment(name: str) -> None:
    record = RECORDS[name]
    for key, field in record.model_fields.items():
        assert field.description, f"{name}.{key} has no description"
    rows = {key: text for key, text, _ in load_config(record, environ={}).rows()}
    environ = {f"DFKV_{name.upper()}__{key.upper()}": text for key, text in rows.items() if text != "-"}
    assert load_config(record, environ=environ).value == load_config(record, environ={}).value


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("17", 17), ("4GiB", 4 << 30), ("4 g", 4 << 30), ("1.5k", 1536), ("2MB", 2_000_000), ("1TiB", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(exact_size(size)) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 GoB", "-1", "1e9", "0x10", "4GiB4"])
def test_sizes_refused(text: str) -> None:
    with pytest.raises(ValueError, match="4GiB"):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 1536 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 GiB",
        "3 TiB",
    ]


@pytest.mark.parametrize(
    ("text", "address"),
    [("h", ("h", 7440)), ("h:1", ("h", 1)), ("[::1]:9", ("::1", 9)), ("[::1]", ("::1", 7440)), (" h:2 ", ("h", 2))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["", ":1", "h:0", "h:65536", "h:x", "::1", "[::1", "[::1]x", "a b:1", "h:1:2"])
def test_addresses_refused(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        split_address(text)


def test_loopback() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "cache-1", "")))


def test_secrets(tmp_path: Path) -> None:
    assert read_secret(None) is None
    assert read_secret(write(tmp_path / "s", "0123456789abcdef\n")) == b"0123456789abcdef"
    with pytest.raises(ConfigError, match="16 bytes"):
        read_secret(write(tmp_path / "short", "0123456789abcde\n"))
    with pytest.raises(ConfigError, match="readable file"):
        read_secret(tmp_path / "missing")


def test_records_are_immutable() -> None:
    value = load_config(ClientConfig, environ={}).value
    with pytest.raises(ValueError, match="frozen"):
        value.name = "x"


def test_section_must_be_the_records() -> None:
    with pytest.raises(ValueError, match="vllm"):
        load_config(VllmConnectorConfig, "client", environ={})
