"""Loads one typed record from file < environment < flags, and remembers where each value came from.

Everything here runs once at start, on the thread that calls it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dfkv_core.bounded import MAX_CONFIG_BYTES, read_bytes
from dfkv_core.config_values import display

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "DFKV_"
ENV_FILE = "DFKV_CONFIG"
SYSTEM_FILE = Path("/etc/dfkv/dfkv.toml")
# Container orchestrators inject DFKV_NODE_PORT=tcp://... for a service of that name; that is no setting of ours.
_SERVICE_LINK = re.compile(r"^(tcp|udp|sctp)://")


class Record(BaseModel):
    """Base of every configuration record. `sections` are read in this order, later ones win."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
    sections: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def is_secret(cls, key: str) -> bool:
        return bool(cls._extra(key).get("secret"))

    @classmethod
    def is_size(cls, key: str) -> bool:
        return bool(cls._extra(key).get("size"))

    @classmethod
    def _extra(cls, key: str) -> dict[str, Any]:
        extra = cls.model_fields[key].json_schema_extra
        return extra if isinstance(extra, dict) else {}


R = TypeVar("R", bound=Record)

# pydantic's words where they would not tell an operator what to write.
_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "string_type": "a text",
    "too_short": "at least one value",
    "tuple_type": "a list",
}


@dataclass(frozen=True)
class Problem:
    """One fault of the configuration, in the words that the message uses."""

    key: str
    source: str
    found: str
    expected: str
    nearest: str | None = None

    def __str__(self) -> str:
        text = f"{self.key} ({self.source}): found {self.found}, expected {self.expected}"
        return f'{text}; did you mean "{self.nearest}"?' if self.nearest else text


class ConfigError(ValueError):
    """The configuration cannot be used. `problems` lists every fault found, not just the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        head = "invalid dfkv configuration:"
        super().__init__(f"{head} {lines[0]}" if len(lines) == 1 else "\n  ".join([head, *lines]))


@dataclass(frozen=True)
class Loaded(Generic[R]):
    """A validated record, and for each key the source of its value ("default", "file ...", "environment ...", ...)."""

    value: R
    sources: Mapping[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """(key, value as text with secrets masked, source) in the record's order."""
        kind = type(self.value)
        out = []
        for key in kind.model_fields:
            value = getattr(self.value, key)
            text = "***" if value and kind.is_secret(key) else display(value, size=kind.is_size(key))
            out.append((key, text, self.sources[key]))
        return out

    def summary(self) -> str:
        """The effective configuration in one log line: `client: name=- (default) addresses=... (flags)`."""
        return f"{self.value.sections[-1]}: " + " ".join(f"{k}={v} ({s})" for k, v, s in self.rows())

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """{key: {"value", "source"}} of JSON types, secrets masked."""
        dumped = self.value.model_dump(mode="json")
        masked = {k: "***" if v and type(self.value).is_secret(k) else v for k, v in dumped.items()}
        return {key: {"value": value, "source": self.sources[key]} for key, value in masked.items()}


@dataclass(frozen=True)
class _Setting:
    value: Any
    source: str


def load_record(
    record: type[R],
    records: Mapping[str, type[Record]],
    *,
    flags: Mapping[str, Any] | None,
    flags_source: str,
    environ: Mapping[str, str] | None,
    file: str | os.PathLike[str] | None,
) -> Loaded[R]:
    """The work of dfkv_core.config.load_config(); `records` maps every known section to its record."""
    environ = os.environ if environ is None else environ
    problems: list[Problem] = []
    settings: dict[str, _Setting] = {}
    layers: list[dict[str, _Setting]] = []
    for path in _files(file, environ):
        layers += _file_layers(path, record, records, problems)
    layers += _environ_layers(environ, record, records, problems)
    layers.append({k: _Setting(v, flags_source) for k, v in (flags or {}).items() if v is not None})
    for key in layers[-1]:
        _check_key(key, key, record, flags_source, problems)
    for layer in layers:
        settings.update(layer)
    if problems:
        raise ConfigError(problems)
    try:
        value = record.model_validate({key: setting.value for key, setting in settings.items()})
    except ValidationError as error:
        raise ConfigError(_problems_of(error, record, settings)) from None
    sources = {key: settings[key].source if key in settings else "default" for key in record.model_fields}
    return Loaded(value, sources)


def _files(explicit: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> list[Path]:
    """The files to read, weakest first. A file that was named must exist; the standard places need not."""
    named = explicit or environ.get(ENV_FILE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            source = "--config" if explicit else f"environment {ENV_FILE}"
            raise ConfigError([Problem("config file", source, f"no file {path}", "a readable TOML file")])
        return [path]
    config_home = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".config")
    return [path for path in (SYSTEM_FILE, Path(config_home) / "dfkv" / "dfkv.toml") if path.is_file()]


def _file_layers(
    path: Path, record: type[Record], records: Mapping[str, type[Record]], problems: list[Problem]
) -> list[dict[str, _Setting]]:
    source = f"file {path}"
    try:
        content = tomllib.loads(read_bytes(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([Problem("config file", source, str(error), "a readable TOML file")]) from None
    for section in content:
        if section not in records:
            problems.append(
                Problem(
                    f"[{section}]",
                    source,
                    "an unknown section",
                    "one of " + ", ".join(f"[{s}]" for s in records),
                    _nearest(section, records),
                )
            )
    layers = []
    for section in record.sections:
        table = content.get(section, {})
        if not isinstance(table, dict):
            problems.append(Problem(section, source, _found(table), f"a table [{section}]"))
            continue
        for key in table:
            _check_key(key, f"{section}.{key}", records[section], source, problems)
        layers.append({key: _Setting(value, f"{source} [{section}]") for key, value in table.items()})
    return layers


def _environ_layers(
    environ: Mapping[str, str],
    record: type[Record],
    records: Mapping[str, type[Record]],
    problems: list[Problem],
) -> list[dict[str, _Setting]]:
    layers: dict[str, dict[str, _Setting]] = {section: {} for section in record.sections}
    for name, value in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name == ENV_FILE:
            continue
        source = f"environment {name}"
        head, separator, tail = name[len(ENV_PREFIX) :].partition("__")
        section, key = head.lower(), tail.lower()
        if not separator:
            meant = _single_underscore(head, records)
            if meant and not _SERVICE_LINK.match(value):
                problems.append(
                    Problem(name, "environment", "one underscore after the section", "two underscores", meant)
                )
        elif section not in records:
            known = "one of " + ", ".join(f"{ENV_PREFIX}{s.upper()}__..." for s in records)
            problems.append(Problem(name, "environment", "an unknown section", known, _nearest(section, records)))
        elif section in layers:
            _check_key(key, f"{section}.{key}", records[section], source, problems)
            layers[section][key] = _Setting(value, source)
    return list(layers.values())


def _single_underscore(head: str, records: Mapping[str, type[Record]]) -> str | None:
    section, _, key = head.lower().partition("_")
    if section in records and key in records[section].model_fields:
        return f"{ENV_PREFIX}{section.upper()}__{key.upper()}"
    return None


def _check_key(key: str, shown: str, record: type[Record], source: str, problems: list[Problem]) -> None:
    if key not in record.model_fields:
        nearest = _nearest(key, record.model_fields)
        known = "a known key" if nearest else "one of " + ", ".join(record.model_fields)
        problems.append(Problem(shown, source, "an unknown key", known, nearest))


def _nearest(word: str, candidates: Iterable[str]) -> str | None:
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _problems_of(error: ValidationError, record: type[Record], settings: Mapping[str, _Setting]) -> list[Problem]:
    problems = []
    for item in error.errors(include_url=False):
        key = str(item["loc"][0]) if item["loc"] else "configuration"
        setting = settings.get(key)
        expected = _EXPECTED.get(item["type"]) or item["msg"]
        for prefix in ("Value error, ", "Input should be "):
            expected = expected.removeprefix(prefix)
        found = "***" if key in record.model_fields and record.is_secret(key) else _found(item["input"])
        if item["loc"]:
            source = setting.source if setting else "default"
            problems.append(Problem(f"{record.sections[-1]}.{key}", source, found, expected))
        else:
            problems.append(Problem(record.sections[-1], "all sources", "values that do not go together", expected))
    return problems


def _found(value: Any) -> str:
    try:
        text = json.dumps(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
