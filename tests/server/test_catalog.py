"""The catalogue lists what can be drawn and ordered."""

from typing import Any

from foreshock.contract.metrics.catalog import METRICS
from foreshock.contract.modes import MODES


async def test_it_lists_every_metric_with_a_curve_and_every_order_with_what_it_does(service: Any) -> None:
    told = await service.get("/v1/catalog")
    assert {one["key"] for one in told["metrics"]} == {one.key for one in METRICS if one.has_series}
    assert [one["name"] for one in told["modes"]] == [mode.name for mode in MODES]
    assert all(one["does"].endswith(".") for one in told["modes"])
