"""The prompts: one long real document, and two questions about it."""

from collections.abc import Iterator
from pathlib import Path

from tests.engines.http_client import EngineClient
from tests.engines.vllm_server import ROOT

QUESTIONS = (
    "\n\nQuestion: who may pass on copies of this work, and what must they include?\nAnswer:",
    "\n\nQuestion: what does this text say about patents and about warranty?\nAnswer:",
)
DEBIAN_TEXTS = Path("/usr/share/common-licenses")


def texts() -> Iterator[str]:
    """The licence, then more of the repository's texts, then those of any Debian system, for models with long tokens."""
    yield (ROOT / "LICENSE").read_text()
    for path in sorted((ROOT / "docs").glob("*.md")):
        yield path.read_text()
    for path in sorted(DEBIAN_TEXTS.glob("*")):
        yield path.read_text(errors="replace")


class Prompts:
    """Prompts of exactly `tokens` tokens. Each repetition reads another window of the document, so that its first tokens,
    and with them every block, are new to every cache; its two prompts differ in the question at the end."""

    def __init__(self, client: EngineClient, tokens: int, repeats: int) -> None:
        self._start = client.tokenize("", special=True)
        self._questions = [client.tokenize(question) for question in QUESTIONS]
        room = tokens - len(self._start)
        longest = max(len(question) for question in self._questions)
        if room <= longest:
            raise ValueError(f"{tokens} tokens leave no room for a document: at least {longest + len(self._start) + 1}")
        document: list[int] = []
        for text in texts():
            document += client.tokenize(text)
            if len(document) >= room + repeats:
                break
        if len(document) < room + repeats:
            raise ValueError(f"the texts make {len(document)} tokens, {room + repeats} are needed: ask for fewer")
        step = min((len(document) - room) // repeats, room)
        self._windows = [document[repeat * step : repeat * step + room] for repeat in range(repeats)]
        self.shared_tokens = tokens - longest
        """Leading tokens that the two prompts of a repetition have in common."""

    def prompt(self, repeat: int, question: int) -> list[int]:
        asked = self._questions[question]
        window = self._windows[repeat]
        return self._start + window[: len(window) - len(asked)] + asked

    def warm_up(self, engine: int) -> list[int]:
        """Some hundred tokens of something else: the first request of an engine pays for what it loads lazily."""
        tokens = self._windows[0][-300:]
        return [*tokens[engine + 1 :], *tokens[: engine + 1]]
