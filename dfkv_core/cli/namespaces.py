"""Namespaces as the commands show them: merged over nodes, found by what a person types, with their fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dfkv_core.cli.output import CommandError

if TYPE_CHECKING:
    from dfkv_core.cli.connect import Answer

_MIN_PREFIX = 4
_REPORTED = ("id", "descriptor", "label", "objects", "stored_bytes", "created_s", "last_used_s")


@dataclass(frozen=True)
class Namespace:
    """One namespace, its sizes added up over the nodes that hold it."""

    id: bytes
    descriptor: bytes
    label: str
    objects: int
    stored_bytes: int
    created_s: int
    last_used_s: int
    nodes: tuple[str, ...]

    @property
    def tenant(self) -> str:
        """Empty: none, or it cannot be read."""
        from dfkv_core.namespace import TAG_NAMES, DescriptorError, raw_fields

        try:
            raw = raw_fields(self.descriptor)
        except DescriptorError:
            return ""
        return next(
            (value.decode(errors="replace") for tag, value in raw.items() if TAG_NAMES.get(tag) == "tenant"), ""
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id.hex(),
            "label": self.label,
            "objects": self.objects,
            "stored_bytes": self.stored_bytes,
            "created_s": self.created_s,
            "last_used_s": self.last_used_s,
            "nodes": list(self.nodes),
        }

    def fields(self) -> dict[str, str]:
        """The descriptor as texts by field name. A field that this version cannot read is shown as hex."""
        from dfkv_core.namespace import TAG_NAMES, DescriptorError, NamespaceDescriptor, raw_fields

        try:
            raw = raw_fields(self.descriptor)
        except DescriptorError as error:
            return {"descriptor": f"not readable: {error}"}
        try:
            decoded = NamespaceDescriptor.decode(self.descriptor)
        except DescriptorError:
            return {TAG_NAMES.get(tag, f"tag {tag}"): value.hex() for tag, value in raw.items()}
        return {TAG_NAMES[tag]: _text(getattr(decoded, TAG_NAMES[tag])) for tag in raw}


def merge(answers: Iterable[Answer]) -> list[Namespace]:
    """One entry per namespace, the most recently used first."""
    found: dict[bytes, Namespace] = {}
    for answer in answers:
        for item in answer.value or ():
            entry = Namespace(**{name: item[name] for name in _REPORTED}, nodes=(answer.node_id,))
            other = found.get(entry.id)
            if other is not None:
                entry = replace(
                    other,
                    label=other.label or entry.label,
                    objects=other.objects + entry.objects,
                    stored_bytes=other.stored_bytes + entry.stored_bytes,
                    created_s=min(other.created_s, entry.created_s),
                    last_used_s=max(other.last_used_s, entry.last_used_s),
                    nodes=(*other.nodes, answer.node_id),
                )
            found[entry.id] = entry
    return sorted(found.values(), key=lambda entry: (-entry.last_used_s, entry.id))


def resolve(text: str, known: Sequence[Namespace]) -> Namespace:
    """The namespace that a person means by a hex id, the start of one, or a label. Raises CommandError."""
    wanted = text.strip().lower()
    by_label = [entry for entry in known if entry.label == text]
    by_id = [entry for entry in known if len(wanted) >= _MIN_PREFIX and entry.id.hex().startswith(wanted)]
    matches = by_id or by_label
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(entry.id.hex() for entry in matches)
        raise CommandError(f"{text!r} is not one namespace but {len(matches)}: {ids}", "give more of the id", 2)
    raise CommandError(f"no namespace {text!r} on these nodes", "`dfkv ls` lists what there is")


def of_tenant(tenant: str, known: Sequence[Namespace]) -> list[Namespace]:
    """Every namespace of a tenant. Raises CommandError when it has none."""
    found = [entry for entry in known if entry.tenant == tenant]
    if found:
        return found
    tenants = sorted({entry.tenant for entry in known if entry.tenant}) or ["none has a tenant"]
    raise CommandError(f"no namespace of tenant {tenant!r} on these nodes", f"known: {', '.join(tenants)}")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return ", ".join(_text(item) for item in value)
    return str(value)
