"""Every dialog, an unfolded incident and the audit trail: whole at any width, and without a barrier in either light."""

from __future__ import annotations

import httpx
import pytest
from selenium.webdriver import Chrome
from tests.server.ui.conftest import Service
from tests.server.ui.page_details import DETAILS, fill, open_details
from tests.server.ui.test_fleet import axe, barriers, themed
from tests.server.ui.test_when_it_matters import OVERFLOW, see_at

from foreshock.contract.modes import DEFAULT_MITIGATION

pytestmark = [pytest.mark.servers, pytest.mark.full]
__all__ = ["axe", "themed"]
LONG = "sweep/" + "w" * 116
WHO, REASON = "n" * 128, "<b>" + "r" * 497


@pytest.fixture(scope="module")
def run(service: Service) -> str:
    """A run whose name, and whatever people wrote of it, is as long as it may be, and has no place to break."""
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client:
        fill(client, LONG, WHO, REASON)
    return LONG


def test_what_is_advised_proposed_and_ordered_is_the_same_mode(service: Service, run: str) -> None:
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client:
        orders = client.get(f"/v1/runs/{run}/commands").json()["commands"]
        incidents = client.get(f"/v1/runs/{run}/incidents").json()["incidents"]
    assert {order["mode"] for order in orders} == {DEFAULT_MITIGATION}
    assert [incident["to_do"] for incident in incidents] == [f"Approve the switch to {DEFAULT_MITIGATION}."]


@pytest.mark.parametrize("width", [1440, 390])
def test_every_dialog_an_unfolded_incident_and_the_audit_trail_are_whole_and_without_a_barrier(
    themed: Chrome, service: Service, run: str, axe: str, width: int
) -> None:
    see_at(themed, width, 900)
    seen, wrong = [], []
    try:
        for name, part in open_details(themed, service.url, run, WHO, REASON):
            seen.append(name)
            found = themed.execute_script(OVERFLOW) + barriers(themed, axe, part)
            wrong += [f"{name}: {what}" for what in found]
    finally:
        themed.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert not wrong, "\n".join(wrong)
    assert len(seen) == len(DETAILS) + sum(detail.confirmed for detail in DETAILS)
