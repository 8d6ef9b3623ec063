"""Series, curves and matrices as the API answers them."""

from pydantic import Field

from foreshock.server.models import Number, Response


class Line(Response):
    """One curve. The four lists have one entry per point; a point spans the steps since the one before."""

    layer: int | None
    head: int | None = Field(description="null for a run-level metric, and for the worst head of a layer")
    steps: list[int]
    low: list[Number]
    high: list[Number]
    last: list[Number]
    worst_head: list[int | None] | None = Field(
        default=None, description="for the worst head of a layer: which head it is"
    )


class Series(Response):
    """One metric against the step, at most max_points points per curve, keeping each point's minimum and maximum.

    A run-level metric gives one line. A per-head metric gives the line of `layer` and `head`; without `head` the worst
    head of `layer` at each point; without both, that of every layer. Worst means largest in absolute value.
    """

    run: str
    metric: str
    unit: str
    lines: list[Line]


class CurveLine(Line):
    """One of many curves; without points where the run has no such head."""

    metric: str
    unit: str


class Curves(Response):
    """Many curves over the same steps, in the order in which they were asked for; drawn as those of Series."""

    run: str
    lines: list[CurveLine]


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
    values: list[list[Number]] = Field(description="[layers, heads]; null where a layer has no such head, or no count")
    steps: list[int] = Field(description="steps that can be asked for, thinned to at most max_steps, ascending")
