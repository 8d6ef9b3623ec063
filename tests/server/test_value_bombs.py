"""Small bodies that hold very many values: what is read of each would take a kilobyte, and the event loop's time."""

from pathlib import Path

import pytest

from foreshock.contract.wire import MAX_VALUES, Switched, head_refs
from foreshock.server.testing import FakeRank, LiveService

MANY = 2 * MAX_VALUES
BEFORE = b'{"run":"r","rank":0,"boot":"b","sequence":1,"events":['
SWITCHED = (
    b'{"kind":"switched","id":"a","step":1,"outcome":"applied","reason":"","after":[],"heads":[%b],"before":[%b]}'
)
HEALTH = b'{"kind":"health","step":1,"dropped":{%b}}'


def listed(value: bytes, times: int = MANY) -> bytes:
    return b",".join([value] * times)


BOMBS = {
    "modes that are none": SWITCHED % (b"", listed(b'""')),
    "modes, a few in each of many events": listed(SWITCHED % (b"", listed(b'""', 1900)), 500),
    "heads that are none": SWITCHED % (listed(b"[0,-1]", MAX_VALUES // 4), b""),
    "reasons that are none": HEALTH % b",".join(b'"?%x":1' % i for i in range(MAX_VALUES // 3)),
    "reasons, a few in each of many events": listed(HEALTH % b",".join(b'"?%x":1' % i for i in range(250)), 500),
    "fields that nobody knows": b'{"kind":"finished","x":[' + listed(b'{"a":{}}') + b"]}",
    "events of a kind that nobody knows": listed(b'{"kind":"new","x":[%b]}' % listed(b"[]", 4000), 500),
}


def peak_bytes(pid: int) -> int:
    """The most memory that a process ever held."""
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@pytest.mark.full
@pytest.mark.promise("S5")
def test_no_small_body_takes_much_memory(tmp_path: Path) -> None:
    with LiveService(tmp_path) as service, service.client() as client:
        for name, events in BOMBS.items():
            body = BEFORE + events + b"]}"
            before = peak_bytes(service.pid)
            answer = client.post("/v1/batches", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 422, name
            assert "values" in answer.json()["detail"] or "error" in answer.json()["detail"]
            assert peak_bytes(service.pid) - before < 20 * len(body) + 128 * 2**20, name


@pytest.mark.full
@pytest.mark.promise("S5")
def test_a_batch_of_a_very_wide_model_has_room(live_service: LiveService) -> None:
    rank = FakeRank(layers=400, heads=range(128))
    heads = tuple(head_refs(rank.layers))
    modes = ("exact_delta",) * len(heads)
    told = [
        Switched(id=f"s{n}", step=1, outcome="refused", heads=heads, before=modes, after=modes, reason="the test says")
        for n in range(3)
    ]
    live_service.post(rank.batch(rank.started(), *told))
