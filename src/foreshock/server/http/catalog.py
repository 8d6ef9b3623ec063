"""GET /v1/catalog: what can be drawn and ordered, as the page and the command line show it."""

from dataclasses import asdict
from typing import Literal

from fastapi import APIRouter
from pydantic import Field

from foreshock.contract.metrics.catalog import METRICS
from foreshock.contract.metrics.metric import MORE_CHARTS, Scale
from foreshock.contract.modes import DEFAULT_MITIGATION, MODES
from foreshock.server.access.auth import Reader
from foreshock.server.models import Problem, Response

router = APIRouter(responses={"default": {"model": Problem, "description": "What is wrong (RFC 9457)"}})


class MetricLevels(Response):
    """From where on a value is marked; with `below`, small values are the bad ones."""

    alarm: float
    watch: float | None
    below: bool


class MetricInfo(Response):
    """A metric of the catalogue: all that is needed to draw it."""

    key: str
    title: str
    help: str
    bad: str
    unit: str
    per_head: bool
    signed: bool = Field(description="either sign may be bad; the worst head is the largest in size")
    scale: Scale = Field(description="of its axis; symlog is linear between -1 and 1 and logarithmic beyond")
    percent: bool = Field(description="a share, read in percent")
    levels: MetricLevels | None
    chart: Literal["first", "more"] | None = Field(description="drawn at once, on demand, or in no chart of its own")


class ModeChoice(Response):
    """A mode that a head may be switched to, alone or with others."""

    name: str
    does: str
    cures: str


class Catalog(Response):
    """Every metric that series and, where per_head, matrix can show, as charts stand; every mode that kernels serve."""

    metrics: list[MetricInfo]
    modes: list[ModeChoice]
    default_mode: str = Field(description="what a head is switched to where no other mode is asked for")


@router.get("/v1/catalog")
async def get_catalog(_: Reader) -> Catalog:
    """Every metric that can be drawn, and every mode that can be ordered."""
    return Catalog(
        metrics=[
            MetricInfo(
                key=m.key,
                title=m.title,
                help=m.help,
                bad=m.bad,
                unit=m.unit,
                per_head=m.head is not None,
                signed=m.signed,
                scale=m.scale,
                percent=m.percent,
                levels=None if m.levels is None else MetricLevels(**asdict(m.levels)),
                chart=None if m.chart is None else "first" if m.chart < MORE_CHARTS else "more",
            )
            for m in sorted(METRICS, key=lambda m: MORE_CHARTS if m.chart is None else m.chart)
            if m.has_series
        ],
        modes=[
            ModeChoice(
                name=mode.name,
                does=mode.does,
                cures=mode.cures,
            )
            for mode in MODES
        ],
        default_mode=DEFAULT_MITIGATION,
    )
