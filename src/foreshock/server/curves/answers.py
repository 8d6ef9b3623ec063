"""Curves and matrices as the API answers them."""

from pydantic import Field

from foreshock.server.models import Number, Response


class CurveLine(Response):
    """One curve, without points where the run lacks the head.

    The four lists have one entry per point; a point spans the steps since the one before, and keeps their minimum and
    maximum.
    """

    metric: str
    unit: str
    layer: int | None
    head: int | None = Field(description="null for a run-level metric, and for the worst head of a layer")
    steps: list[int]
    low: list[Number]
    high: list[Number]
    last: list[Number]
    worst_head: list[int | None] | None = Field(
        default=None, description="for the worst head of a layer: which head it is, the largest in absolute value"
    )


class Curves(Response):
    """Curves over the same steps, in the order in which they were asked for; at most max_points points each.

    Where no layer was named for a metric of heads, the lines of all layers stand in its place.
    """

    run: str
    lines: list[CurveLine]
    unknown: list[str] = Field(description="lines that were asked for of a layer or head that the run does not have")


class Matrix(Response):
    """One per-head metric at the newest step that is not after the one asked for.

    Spectral norms, which are measured now and then, are shown as they were last measured.
    """

    run: str
    metric: str
    unit: str
    step: int | None = Field(description="the step shown; null when there is no sample at or before the one asked for")
    measured_step: int | None = Field(description="by when the values were measured; null when they never were")
    layers: list[int]
    heads: list[int]
    next_layer: int | None = Field(
        default=None, description="the first layer that did not fit; ask again with from_layer for it and those after"
    )
    values: list[list[Number]] = Field(description="[layers, heads]; null where a layer lacks the head, or its count")
    steps: list[int] = Field(description="steps that can be asked for, thinned to at most max_steps, ascending")
