"""What the process counts about itself since its start."""

from collections import Counter


class Counters:
    """Mutable totals that /metrics shows."""

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter(stored=0, duplicate=0, refused=0, busy=0)
        self.refusals: Counter[str] = Counter({"login": 0, "throttled login": 0, "token": 0})
        self.webhooks: Counter[tuple[str, str]] = Counter()
        self.commit_seconds = 0.0
        self.series_dropped = 0
