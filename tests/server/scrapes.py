"""Series and runs in a scrape of /metrics."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families as parse_text

Shown = set[tuple[str, tuple[tuple[str, str], ...]]]


def series_of(text: str) -> dict[tuple[str, ...], float]:
    """The values of /metrics by (name, "label=value", ...)."""
    return {
        (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


async def shown(service: Any) -> Shown:
    text = (await service.client.get("/metrics")).text
    return {(s.name, tuple(sorted(s.labels.items()))) for family in parse_text(text) for s in family.samples}


def runs_of(found: Shown, metric: str) -> set[str]:
    return {dict(own)["run"] for name, own in found if name == metric}
