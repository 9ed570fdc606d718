"""Node.stats() as Prometheus metrics, and the HTTP endpoint that serves them where one is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dfkv_core import __version__
from dfkv_core.config import join_address
from dfkv_core.metrics_table import Spec, locate

_Family = GaugeMetricFamily | CounterMetricFamily


class NodeCollector(Collector):
    """Reads Node.stats() at each scrape, on the scraping thread; no values are kept here."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]], *, node_id: str) -> None:
        self._stats = stats
        self._node_id = node_id

    def collect(self) -> Iterable[Metric]:
        info = InfoMetricFamily("dfkv_node", "The node itself.")
        info.add_metric([], {"node_id": self._node_id, "version": __version__})
        yield info
        families: dict[str, _Family] = {}
        for key, value in self._stats().items():
            if isinstance(value, (int, float)):
                place = locate(key)
                family = families.get(place.family)
                if family is None:
                    family = families[place.family] = _new_family(place.family, place.spec)
                family.add_metric(place.labels, value)
        yield from families.values()


def _new_family(name: str, spec: Spec) -> _Family:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return kind(f"dfkv_node_{name}", spec.help, labels=spec.labels)


class MetricsServer:
    """An HTTP endpoint for one node, on its own daemon threads. Raises OSError when the address cannot be had."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]], host: str, port: int, *, node_id: str) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(NodeCollector(stats, node_id=node_id))
        self._host = host
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)

    @property
    def address(self) -> str:
        return join_address(self._host, self._server.server_port)

    def close(self) -> None:
        """Stops listening and joins the thread. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
