"""What a node or a membership service counts as Prometheus metrics, and the HTTP endpoint for it where one is configured."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import MetricsHandler
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dfkv_core import __version__
from dfkv_core.config import join_address
from dfkv_core.metrics_table import Spec, Table, locate

_Family = GaugeMetricFamily | CounterMetricFamily
# Scrapes at once, and how long a peer may say nothing: an endpoint that asks nobody for a secret stays small.
_MAX_SCRAPES = 8
_SILENCE_S = 5.0


class StatsCollector(Collector):
    """Calls stats() at each scrape, on the scraping thread; no values are kept here."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]], table: Table, info: Mapping[str, str]) -> None:
        self._stats = stats
        self._table = table
        self._info = info

    def collect(self) -> Iterable[Metric]:
        info = InfoMetricFamily(self._table.prefix, "The process itself.")
        info.add_metric([], {**self._info, "version": __version__})
        yield info
        families: dict[str, _Family] = {}
        for key, value in self._stats().items():
            if isinstance(value, (int, float)):
                place = locate(key, self._table)
                family = families.get(place.family)
                if family is None:
                    family = families[place.family] = _new_family(f"{self._table.prefix}_{place.family}", place.spec)
                family.add_metric(place.labels, value)
        yield from families.values()


def _new_family(name: str, spec: Spec) -> _Family:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return kind(name, spec.help, labels=spec.labels)


class _Server(ThreadingHTTPServer):
    """At most _MAX_SCRAPES threads; further connections are closed."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MAX_SCRAPES)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away is no fault of the process, and not worth a traceback in its log."""


class MetricsServer:
    """An HTTP endpoint for one process, on its own daemon threads, from which it calls stats().

    info: labels of the metric that describes the process. Raises OSError when the address cannot be had."""

    def __init__(
        self, stats: Callable[[], Mapping[str, Any]], host: str, port: int, *, table: Table, info: Mapping[str, str]
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatsCollector(stats, table, info))
        self._host = host
        scrape: Any = MetricsHandler.factory(registry)
        self._server = _Server((host, port), type("Scrape", (scrape,), {"timeout": _SILENCE_S}))
        self._thread = threading.Thread(target=self._server.serve_forever, name="dfkv-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return join_address(self._host, self._server.server_port)

    def close(self) -> None:
        """Stops listening and joins the thread. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
