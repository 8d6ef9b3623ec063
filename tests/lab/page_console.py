"""A console that queries the live page of a demo."""

import io

import httpx


class PageConsole(io.StringIO):
    """Collects the output; when `sentence` is written, reads the runs that the live page shows."""

    def __init__(self, sentence: str) -> None:
        super().__init__()
        self._sentence = sentence
        self.seen: dict[str, dict[str, object]] = {}

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._sentence in text:
            (page,) = [line for line in self.getvalue().splitlines() if line.startswith("Live page: ")]
            url, _, runs = page.removeprefix("Live page: ").partition("/?runs=")
            self.seen = {run: httpx.get(f"{url}/v1/runs/{run}", timeout=60).json() for run in runs.split(",")}
        return written
