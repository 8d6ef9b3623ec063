"""Writes the tables of docs/models.md from the tests and the zoo's records; --check says whether they are stale."""

import contextlib
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[1]
ZOO: Final = ROOT / "benchmarks" / "results" / "zoo.json"
REDRAWN: Final = ROOT / "benchmarks" / "results" / "zoo_redrawn.json"
UNBUILT: Final = ROOT / "tests" / "zoo" / "unbuilt.json"
PAGE: Final = ROOT / "docs" / "models.md"
MODELS: Final = (
    "GPT-2",
    "Llama",
    "Qwen2",
    "Mistral",
    "Gemma2",
    "nanoGPT",
    "ViT",
    "torch TransformerEncoder",
    "plain attention",
    "FlexAttention",
)
MODES: Final = {
    "eager": "",
    "torch.compile": "one graph, AOT Autograd without code generation",
    "inductor": "one graph, code generation",
    "CUDA graphs": "captured by hand, and by torch.compile's reduce-overhead",
    "checkpointing (reentrant)": "",
    "checkpointing (non-reentrant)": "",
    "selective checkpointing": "the operator saved, or recomputed",
    "checkpoint around attention": "round the call of attention alone",
    "gradient accumulation": "",
    "DDP": "two processes",
    "FSDP2": "two processes",
    "tensor parallel": "two processes",
    "pipeline": "two stages, two processes",
    "autocast bf16": "",
    "pure bf16": "",
    "keep": 'attach(model, attention="keep"): the model\'s own attention stays, a sample is measured',
}
UNBUILT_KINDS: Final = {
    "class|no class|No module named": "no class that stands by itself",
    "M parameters": "stays large however its configuration is shrunk",
    "missing \\d+ required|is required|must be|have to|has to|Make sure|should be|expected": "wants inputs of its own",
    "^config": "its configuration refuses small sizes",
    "^build": "cannot be built from a shrunk configuration",
    "": "fails in its first step",
}
"""What stands in the way, the first pattern that fits."""


class _Marks:
    """Collects the `execution` marks of the tests, those of tests that want a GPU apart."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[tuple[str, str]]] = {"CPU": Counter(), "GPU": Counter()}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            wanted = " ".join(mark.kwargs["reason"] for mark in item.iter_markers("skipif"))
            place = "GPU" if "a CUDA device" in wanted or "a GPU" in wanted else "CPU"
            for mark in item.iter_markers("execution"):
                self.counts[place][mark.args] += 1


def marks() -> dict[str, Counter[tuple[str, str]]]:
    """How many tests serve each (model, mode), on a CPU and on a GPU."""
    collected = _Marks()
    given = ["--collect-only", "-qq", "--tier", "full", "-m", "execution", "-p", "no:cacheprovider", "tests/monitor"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = pytest.main(["--rootdir", str(ROOT), *given], plugins=[collected])
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"the tests of tests/monitor could not be collected:\n{output.getvalue()}")
    pairs = {pair for counts in collected.counts.values() for pair in counts}
    unknown = sorted(pair for pair in pairs if pair[0] not in MODELS or pair[1] not in MODES)
    if unknown:
        raise SystemExit(f"execution marks name {unknown}; models are {MODELS}, modes are {tuple(MODES)}")
    return collected.counts


def page() -> str:
    """docs/models.md with what stands between its marks made anew; the rest is written by hand."""
    made = {"modes": _modes, "zoo": _zoo, "redrawn": _redrawn, "unbuilt": _unbuilt}

    def fill(mark: re.Match[str]) -> str:
        return "\n".join((mark[1], *made[mark[2]](), mark[3]))

    return re.sub(r"(<!-- made: (\w+) -->).*?(<!-- end -->)", fill, PAGE.read_text(), flags=re.DOTALL)


def _modes() -> Iterator[str]:
    counts = marks()
    rows = [["", *MODELS], ["---"] * (len(MODELS) + 1)]
    rows += [[mode, *(_cell(counts, model, mode) for model in MODELS)] for mode in MODES]
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""
    yield from (f"- **{mode}**: {meaning}." for mode, meaning in MODES.items() if meaning)


def _cell(counts: dict[str, Counter[tuple[str, str]]], model: str, mode: str) -> str:
    cpu, gpu = counts["CPU"][model, mode], counts["GPU"][model, mode]
    parts = [str(cpu)] * bool(cpu) + [f"{gpu} GPU"] * bool(gpu)
    return " + ".join(parts) or "·"


def _zoo() -> Iterator[str]:
    """The lines of that part."""
    records: list[dict[str, Any]] = json.loads(ZOO.read_text())
    families: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        families.setdefault(record["family"], []).append(record)
    told = {way: [how for r in records for how in r["layers"].get(way, {}).values()] for way in ("keep", "kernels")}
    wrong, refused = (sum(bool(record[what]) for record in records) for what in ("wrong", "refused"))
    keep, kernels = (hows.count("counted") for hows in told.values())
    yield (
        f"{len(records)} entries, {max(map(len, told.values()))} modules with attention, {keep} of them measured with "
        f"`keep` and {kernels} with `kernels`; {wrong} entries wrong, {refused} refused by attach with a sentence. "
        "What is not measured, by the reason that was named:"
    )
    yield ""
    named: dict[str, list[str]] = {}
    for family, members in sorted(families.items()):
        ways = [record["layers"].get(way, {}).values() for record in members for way in ("keep", "kernels")]
        hows = [how for way in ways for how in way]
        share = f" ({hows.count('counted')} of {len(hows)} measured)" if "counted" in hows else ""
        for reason in {_reason(how) for how in hows if how != "counted"}:
            named.setdefault(reason, []).append(f"{family}{share}")
        if any(record["wrong"] for record in members):
            named.setdefault("wrong", []).append(family)
    yield from (f"- {reason}: {', '.join(those)}." for reason, those in sorted(named.items()))


def _redrawn() -> Iterator[str]:
    """The lines of that part."""
    records: list[dict[str, Any]] = json.loads(REDRAWN.read_text())
    yield "| numbers | entries | wrong | cannot | refused | measured | named | missed |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    numbers: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        numbers.setdefault(record["name"].rpartition(" (")[2].removesuffix(")"), []).append(record)
    for drawn, members in sorted(numbers.items()):
        keep = [how for record in members for how in record["layers"].get("keep", {}).values()]
        cells = (
            drawn,
            len(members),
            sum(bool(record["wrong"]) for record in members),
            sum("all" in record["skipped"] for record in members),
            sum(bool(record["refused"]) for record in members),
            keep.count("counted"),
            sum(how not in ("counted", "missed") for how in keep),
            keep.count("missed"),
        )
        yield f"| {' | '.join(map(str, cells))} |"


def _reason(how: str) -> str:
    """The reason in what foreshock said of a module, without the module's name and sizes."""
    said = re.search(
        r"(?:not watched(?: in this call)?|cannot be watched|counted nothing in steps? [^:]*): ([^;]*)", how
    )
    return re.sub(r"\[[\d, ]+\]", "[...]", said[1] if said else how).strip()


def _unbuilt() -> Iterator[str]:
    reasons: dict[str, str] = json.loads(UNBUILT.read_text())
    yield f"{len(reasons)} model types. What stands in their way, by kind:"
    yield ""
    kinds: dict[str, list[str]] = {kind: [] for kind in UNBUILT_KINDS.values()}
    for model_type, reason in sorted(reasons.items()):
        kinds[next(kind for pattern, kind in UNBUILT_KINDS.items() if re.search(pattern, reason))].append(model_type)
    yield from (f"- {kind}: {len(types)}." for kind, types in kinds.items() if types)


def main(arguments: list[str]) -> int:
    """Write or compare the page; the exit code."""
    if arguments != ["--check"]:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        print("docs/models.md is stale; run .venv/bin/python -P scripts/models_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
