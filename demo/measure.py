"""The runs and their measurement: what is asked of which engine, in which order."""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from tests.engines.http_client import Completion, Metrics
from tests.engines.process import ServerError
from tests.engines.setup_engine import EngineEnv
from tests.engines.vllm_server import DfkvServe, VllmOptions, VllmServer, connector_config

from .document import Prompts

COLD = "cold, no dfkv"
SAVING = "cold, dfkv saving"
RESTORED = "restored, fresh engine"
RESTARTED = "restored, after its restart"
LOCAL = "local prefix hit"
RUNS = (COLD, SAVING, RESTORED, RESTARTED, LOCAL)

ANSWER_TOKENS = 16
WRITER_QUESTION, READER_QUESTION = 0, 1
LEAST = {COLD: 1, SAVING: 2}  # runs, however slow the machine
RESTART_SHARE = 0.6  # of the time that three engines together need to start
STOPS_S = 6.0
ROUND_S = 0.3  # between two requests
METRICS_DEADLINE_S = 3.0

Say = Callable[[str], None]
Doing = Callable[[str], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Setup:
    """What is measured. ``budget_s``: time for the whole measurement, engines' start included."""

    engine: EngineEnv
    model: Path
    logs: Path
    tokens: int = 8192
    repeats: int = 5
    kv_space_gib: int = 1
    ram: str = "4GiB"
    budget_s: float = 400.0


@dataclass(frozen=True)
class Traffic:
    """What the connector of one engine has moved: prompt tokens restored, payload bytes, seconds of its transfers."""

    restored_tokens: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    saved_bytes: int = 0
    save_s: float = 0.0

    @classmethod
    def of(cls, metrics: Metrics) -> "Traffic":
        return cls(
            int(metrics.total("vllm:dfkv_tokens_total", kind="loaded")),
            int(metrics.total("vllm:dfkv_bytes_total", direction="load")),
            metrics.total("vllm:dfkv_load_seconds_total"),
            int(metrics.total("vllm:dfkv_bytes_total", direction="save")),
            metrics.total("vllm:dfkv_save_seconds_total"),
        )

    def since(self, before: "Traffic") -> "Traffic":
        return Traffic(
            self.restored_tokens - before.restored_tokens,
            self.loaded_bytes - before.loaded_bytes,
            self.load_s - before.load_s,
            self.saved_bytes - before.saved_bytes,
            self.save_s - before.save_s,
        )


@dataclass(frozen=True)
class Sample:
    """One request of one run. ``document``: which window of the text it asked about."""

    run: str
    repeat: int
    document: int
    answer: Completion
    traffic: Traffic

    @property
    def moved_bytes(self) -> int:
        return self.traffic.saved_bytes if self.run == SAVING else self.traffic.loaded_bytes

    @property
    def gb_per_s(self) -> float | None:
        """Payload over the time of the transfers, 10^9 bytes a second."""
        seconds = self.traffic.save_s if self.run == SAVING else self.traffic.load_s
        return self.moved_bytes / seconds / 1e9 if self.moved_bytes and seconds > 0 else None


@dataclass
class Results:
    """``idle_cpus``: CPUs that each engine kept busy with nothing to do, before the measurement."""

    samples: list[Sample] = field(default_factory=list)
    starts_s: dict[str, float] = field(default_factory=dict)
    idle_cpus: dict[str, float] = field(default_factory=dict)
    shared_tokens: int = 0

    def of(self, run: str) -> list[Sample]:
        return [sample for sample in self.samples if sample.run == run]

    def at(self, run: str, repeat: int) -> Sample | None:
        return next((sample for sample in self.of(run) if sample.repeat == repeat), None)

    def cold(self, document: int) -> Sample | None:
        """The run that computed the same prompt from its first token."""
        return next((sample for sample in self.of(COLD) if sample.document == document), None)


class Measurement:
    """Engine A has no connector; B fills the cache; C is another process that never computed what it is asked about.

    All stay up, since an idle engine uses no CPU (that is measured), and are asked in turn, one request at a time: what a
    busy machine does to one run it does to all. Each repetition has a document of its own, computed cold by A and B. Where that
    does not fit into the budget A is left out, and where B does not fit either C forgets an earlier document and restores
    that one again.
    """

    def __init__(self, setup: Setup, say: Say, doing: Doing) -> None:
        self._setup = setup
        self._say = say
        self._doing = doing
        self._node = DfkvServe(setup.logs / "dfkv-serve.log", ram=setup.ram)
        connector = connector_config(self._node.port)
        self._without = self._engine("A", None)
        self._writer = self._engine("B", connector)
        self._reader = self._engine("C", connector)
        self._results = Results()
        self._begun = time.monotonic()

    def _engine(self, name: str, connector: dict[str, object] | None) -> VllmServer:
        setup = self._setup
        options = VllmOptions(
            setup.model,
            connector=connector,
            max_model_len=setup.tokens + 512,
            kv_space_gib=setup.kv_space_gib,
        )
        return VllmServer(setup.engine, options, setup.logs / f"vllm-{name}.log", name=f"engine {name}")

    def run(self) -> Results:
        """Raises ServerError, HttpError, OSError. Leaves no process behind."""
        begun = self._begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._node)
            self._say(f"dfkv serve is ready ({time.monotonic() - begun:.1f} s)")
            engines = [self._without, self._writer, self._reader]
            for engine in engines:
                stack.callback(engine.stop)
                engine.start()
            with self._doing("starting three vLLM engines: A without dfkv, B and C with it"):
                for engine in engines:
                    self._results.starts_s[engine.name] = engine.wait_ready()
            prompts = Prompts(self._without.client, self._setup.tokens, self._setup.repeats)
            self._results.shared_tokens = prompts.shared_tokens
            self._say(f"three engines are ready ({time.monotonic() - begun:.0f} s)")
            self._warm_up(engines, prompts)
            for repeat in range(self._setup.repeats):
                self._repetition(repeat, prompts)
            self._without.stop()
            self._writer.stop()
            self._restart(prompts)
        return self._results

    def _warm_up(self, engines: list[VllmServer], prompts: Prompts) -> None:
        with self._doing("warming up"):
            with ThreadPoolExecutor(len(engines)) as pool:
                list(pool.map(self._complete, engines, map(prompts.warm_up, range(len(engines)))))
            for engine in engines:
                self._results.idle_cpus[engine.name] = engine.busy_cpus()
        busiest = max(self._results.idle_cpus.values())
        self._say(f"warm; idle engines use {busiest:.2f} CPUs at most")

    def _repetition(self, repeat: int, prompts: Prompts) -> None:
        document = len(self._results.of(SAVING))
        if self._fits(COLD, repeat):
            self._ask(COLD, repeat, document, self._without, prompts.prompt(document, READER_QUESTION))
        if self._fits(SAVING, repeat):
            self._ask(SAVING, repeat, document, self._writer, prompts.prompt(document, WRITER_QUESTION))
        else:
            document = repeat % document
            self._reader.client.reset_prefix_cache()
        asked = prompts.prompt(document, READER_QUESTION)
        self._ask(RESTORED, repeat, document, self._reader, asked)
        self._ask(LOCAL, repeat, document, self._reader, asked)

    def _fits(self, run: str, repeat: int) -> bool:
        """Whether there is time for computing a document cold, besides all that has to follow: this and the later
        repetitions, the restart and what is restored after it. Later documents go before further runs without dfkv."""
        results = self._results
        if len(results.of(run)) < LEAST[run]:
            return True
        longest_s = {name: max((s.answer.total_s for s in results.of(name)), default=0.0) + ROUND_S for name in RUNS}
        later = self._setup.repeats - repeat - 1
        follows_s = (later + 1) * (longest_s[RESTORED] + longest_s[LOCAL]) + self._setup.repeats * longest_s[RESTORED]
        follows_s += STOPS_S + RESTART_SHARE * max(results.starts_s.values())
        if run == COLD:
            follows_s += (later + 1) * longest_s[SAVING]
        return time.monotonic() - self._begun + longest_s[run] + follows_s <= self._setup.budget_s

    def _restart(self, prompts: Prompts) -> None:
        engine = self._reader
        with self._doing("restarting engine C"):
            engine.stop()
            engine.start()
            engine.wait_ready()
            self._complete(engine, prompts.warm_up(len(self._results.starts_s)))
        self._say("engine C is a fresh process again")
        documents = len(self._results.of(SAVING))
        for repeat in range(self._setup.repeats):
            if repeat >= documents:
                engine.client.reset_prefix_cache()
            document = repeat % documents
            self._ask(RESTARTED, repeat, document, engine, prompts.prompt(document, READER_QUESTION))

    def _ask(self, run: str, repeat: int, document: int, engine: VllmServer, prompt: list[int]) -> None:
        before = Traffic.of(engine.client.metrics())
        with self._doing(f"{repeat + 1}/{self._setup.repeats}  {run}"):
            answer = self._complete(engine, prompt)
            traffic = self._settled(run, engine, before)
        self._results.samples.append(Sample(run, repeat, document, answer, traffic))
        moved = f", {traffic.restored_tokens} tokens restored" if traffic.restored_tokens else ""
        self._say(f"  {repeat + 1}/{self._setup.repeats}  {run:<28} first token after {answer.ttft_s:6.2f} s{moved}")

    def _complete(self, engine: VllmServer, prompt: list[int]) -> Completion:
        try:
            return engine.client.complete(prompt, max_tokens=ANSWER_TOKENS)
        except (OSError, HTTPException) as error:
            raise ServerError(
                f"{engine.name} did not answer: {type(error).__name__} {error}\n{engine.tail()}"
            ) from error

    def _settled(self, run: str, engine: VllmServer, before: Traffic) -> Traffic:
        """The traffic of the request that has just ended, once all of it is stored and the engine has published it."""
        if run == SAVING:
            self._node.wait_quiet()
        until = time.monotonic() + METRICS_DEADLINE_S
        while True:
            traffic = Traffic.of(engine.client.metrics()).since(before)
            awaited = {SAVING: traffic.saved_bytes, RESTORED: traffic.loaded_bytes, RESTARTED: traffic.loaded_bytes}
            if awaited.get(run, 1) > 0 or time.monotonic() > until:
                return traffic
            time.sleep(0.05)
