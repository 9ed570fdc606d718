"""What tests and demonstrations ask an OpenAI-compatible engine: a streamed completion, and its Prometheus metrics."""

import http.client
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class HttpError(RuntimeError):
    """The server answered with another status than 200; carries both."""

    def __init__(self, path: str, status: int, body: str) -> None:
        super().__init__(f"{path} answered {status}: {body[:500]}")
        self.status = status


@dataclass
class Completion:
    """A greedy completion. Times are the client's, from before the connection is made.

    ``top``: for each token the two best candidates, (token id, log-probability), best first.
    ``cached_tokens``: prompt tokens that the engine did not compute, from its own prefix cache or from a connector.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""

    def gap(self, index: int) -> float:
        """How much more likely, in log-probability, the token at `index` was than the second best."""
        best = self.top[index]
        return best[0][1] - best[1][1] if len(best) > 1 else float("inf")


class Metrics:
    """One scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            if found := _SAMPLE.match(line):
                name, labels, value = found.groups()
                self._samples.append((name, dict(_LABEL.findall(labels or "")), float(value)))

    def total(self, name: str, **labels: str) -> float:
        """The sum over the samples of `name` with these labels; 0 when there are none."""
        return sum(
            value
            for sample, found, value in self._samples
            if sample == name and all(found.get(key) == wanted for key, wanted in labels.items())
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The samples of `name`, added up by the value of one label."""
        total: dict[str, float] = {}
        for sample, found, value in self._samples:
            if sample == name and label in found:
                total[found[label]] = total.get(found[label], 0.0) + value
        return total

    def names(self, prefix: str = "") -> list[str]:
        return sorted({name for name, _, _ in self._samples if name.startswith(prefix)})


class EngineClient:
    """Requests to one engine, one connection each. Any thread."""

    def __init__(self, port: int, model: str, *, timeout_s: float = 600.0) -> None:
        self._port = port
        self._model = model
        self._timeout_s = timeout_s

    def complete(
        self,
        prompt: Sequence[int] | str,
        *,
        max_tokens: int = 16,
        model: str | None = None,
        cache_salt: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Completion:
        """A greedy, streamed completion. Raises HttpError, OSError, TimeoutError."""
        body: dict[str, Any] = {
            "model": model or self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        body |= dict(extra or {})
        payload = json.dumps(body).encode()
        result = Completion()
        start = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout_s)
        try:
            connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise HttpError("/v1/completions", response.status, response.read().decode(errors="replace"))
            for line in response:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    _add(result, json.loads(line[6:]), time.monotonic() - start)
        finally:
            connection.close()
        result.total_s = time.monotonic() - start
        return result

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """The model's own tokens of a text; with `special`, the tokens that the model wants around it too."""
        answer = self._call("POST", "/tokenize", {"model": self._model, "prompt": text, "add_special_tokens": special})
        return [int(token) for token in json.loads(answer)["tokens"]]

    def healthy(self) -> bool:
        return answers(self._port, "/health")

    def metrics(self) -> Metrics:
        return scrape(self._port)

    def reset_prefix_cache(self, deadline_s: float = 30.0) -> None:
        """Empties the engine's own prefix cache, waiting for blocks that are still being saved. Needs development mode."""
        until = time.monotonic() + deadline_s
        while not json.loads(self._call("POST", "/reset_prefix_cache")).get("success"):
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the engine's prefix cache could not be emptied in {deadline_s} s: blocks are in use"
                )
            time.sleep(0.1)

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        return self._call("POST", path, body)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> bytes:
        return call(self._port, method, path, body, timeout_s or self._timeout_s)


def call(
    port: int,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 30.0,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """One request to a server on loopback. Raises HttpError, OSError, TimeoutError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if payload else {}
        connection.request(method, path, payload, kind | dict(headers or {}))
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise HttpError(path, response.status, content.decode(errors="replace"))
        return content
    finally:
        connection.close()


def answers(port: int, path: str) -> bool:
    """Whether a server on loopback answers a GET of `path` with 200."""
    try:
        call(port, "GET", path, timeout_s=5.0)
    except (HttpError, OSError, http.client.HTTPException):
        return False
    return True


def scrape(port: int) -> Metrics:
    """The metrics of a server on loopback."""
    return Metrics(call(port, "GET", "/metrics").decode())


def _add(result: Completion, event: dict[str, Any], elapsed_s: float) -> None:
    """Adds one server-sent event to a completion."""
    if "error" in event:
        raise HttpError("/v1/completions", 500, json.dumps(event["error"]))
    if usage := event.get("usage"):
        result.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        result.cached_tokens = details.get("cached_tokens") or 0
    for choice in event.get("choices", ()):
        tokens = choice.get("token_ids") or []
        if tokens and not result.token_ids:
            result.ttft_s = elapsed_s
        result.token_ids += tokens
        result.text += choice.get("text") or ""
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
        for candidates in (choice.get("logprobs") or {}).get("top_logprobs") or ():
            pairs = [(int(name.removeprefix("token_id:")), value) for name, value in candidates.items()]
            result.top.append(sorted(pairs, key=lambda pair: -pair[1])[:2])
