"""Samples of /metrics as text, one line each, the same in both formats of Prometheus; and the whole of them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from foreshock.contract.metrics.catalog import METRICS

Labels = tuple[str, ...]
Line = tuple[str, str]
"""(metric name, its sample as text)."""


def _families() -> Iterable[tuple[str, Family, Labels]]:
    for metric in METRICS:
        yield metric.name, Family(metric.name.removesuffix("_total"), metric.help, metric.kind), metric.labels
        if metric.head is not None:
            text = f"{metric.help} Value of the layer's worst head."
            yield metric.layer_name, Family(metric.layer_name, text, metric.kind), ("run", "layer")


_FAMILIES: Final = {name: family for name, family, _ in _families()}
_ORDER: Final = {name: sorted(range(len(labels)), key=labels.__getitem__) for name, _, labels in _families()}
"""Labels stand by name, as prometheus_client writes them."""
_SAMPLE: Final = {
    name: f"{name}{{" + ",".join(f'{label}="%s"' for label in sorted(labels)) + "} %s\n" if labels else f"{name} %s\n"
    for name, _, labels in _families()
}
_PLAIN: Final = 1e6
"""Smaller numbers are written as Python writes them."""
_TO_ESCAPE: Final = re.compile(r'[\\"\n]')


def line(name: str, labels: Labels, value: float) -> Line:
    """A sample as text; its labels as the catalogue orders them."""
    own = [labels[place] for place in _ORDER[name]]
    if _TO_ESCAPE.search("".join(own)):
        own = [text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for text in own]
    plain = -_PLAIN < value < _PLAIN  # as prometheus_client would; it looks at every number for what is rare
    number = repr(value) if plain else floatToGoString(value)  # type: ignore[no-untyped-call]
    return name, _SAMPLE[name] % (*own, number)


class _Families(Collector):
    """Families without samples, whose heads prometheus_client writes."""

    def __init__(self, *families: Family) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def encoder(accept: str) -> tuple[Callable[[Mapping[str, Sequence[str]]], bytes], str]:
    """What makes a body of lines by metric, and its content type, for the Accept header of a scraper."""
    # the one other escaping that changes names that need none; the lines are made before it is known who asks
    heads, content_type = choose_encoder(accept.replace("escaping=dots", "escaping=underscores"))

    def encode(lines: Mapping[str, Sequence[str]]) -> bytes:
        end = heads(_Families())
        parts = []
        for name, family in _FAMILIES.items():
            if own := lines.get(name):
                parts += [heads(_Families(family)).removesuffix(end), "".join(own).encode()]
        return b"".join([*parts, end])

    return encode, content_type
