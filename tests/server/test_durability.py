import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.server.senders import Sender

from foreshock.server.testing import FakeRank, LiveService


@pytest.mark.full
@pytest.mark.promise("S1")
def test_kill_nine_under_load_loses_nothing_acknowledged_and_doubles_nothing(
    tmp_path: Path, sizes: Any, record_property: Callable[[str, Any], None]
) -> None:
    """Each kill is at a random moment, while three ranks send without end."""
    most, until = sizes("service_kills", quick=2, long=500), sizes.until()
    when = random.Random(sizes("seed", quick=7, long=7))
    sent: set[tuple[int, int]] = set()
    kills = 0
    while not kills or (kills < most and time.monotonic() < until):
        kills += 1
        with LiveService(tmp_path) as service:
            senders = [Sender(partial(str, service.url), FakeRank(rank=10 * kills + number)) for number in range(3)]
            while not any(sender.acknowledged > 1 for sender in senders):
                time.sleep(0.005)
            time.sleep(when.uniform(0.0, 0.5))
            service.kill()
            for sender in senders:
                sender.stop()  # of the batches, which it numbers from 1 on, the first has no sample
                sent |= {(sender.rank.rank, sequence) for sequence in range(2, sender.acknowledged + 1)}
    with LiveService(tmp_path):  # recovers what the last kill left
        pass
    kept = samples_by_batch(tmp_path / "foreshock.db")
    record_property("kill -9", kills)
    record_property("batches acknowledged", len(sent))
    record_property("lost", len(sent - kept.keys()))
    record_property("doubled", sum(count > 1 for count in kept.values()))
    assert sent <= kept.keys()
    assert set(kept.values()) == {1}


def samples_by_batch(database: Path) -> dict[tuple[int, int], int]:
    """How many samples each (rank, sequence) left; the test sends one with each."""
    query = "SELECT rank, sequence, count(*) FROM samples JOIN boots ON boots.id = boot_id GROUP BY boot_id, sequence"
    with closing(sqlite3.connect(database)) as connection:
        return {(rank, sequence): count for rank, sequence, count in connection.execute(query)}
