"""Events in words, for the log, the page and the audit trail."""

from collections.abc import Sequence

from foreshock.contract.wire import Finished, HeadRef, Started, Switched


def printable(text: str) -> str:
    """Text without control characters: one line in the log, and storable (PostgreSQL takes no NUL)."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def heads_in_words(heads: Sequence[HeadRef] | None) -> str:
    """layer 0 head 2; at most four by name."""
    if heads is None:
        return "every head"
    named = ", ".join(f"layer {layer} head {head}" for layer, head in heads[:4])
    return named + (f" and {len(heads) - 4} more" if len(heads) > 4 else "") if heads else "no head"


def ended_before_the_answer(heads: Sequence[HeadRef] | None) -> str:
    """Why an order is refused that was under way when the last rank that holds its heads ended."""
    left = f"Nobody is left to switch {heads_in_words(heads)}: every rank that could ended before it answered."
    return f"{left} Order it again when the run is resumed."


def started_sentence(rank: int, started: Started) -> str:
    """What a boot watches."""
    heads = sum(len(layer.heads) for layer in started.layers)
    return f"Rank {rank} started at step {started.step}: {len(started.layers)} layers, {heads} heads, {started.policy}."


def finished_sentence(rank: int, finished: Finished) -> str:
    """How a boot ended."""
    return f"Rank {rank} {finished.status} at step {finished.step}."


def switched_sentence(switched: Switched) -> str:
    """What became of a switch."""
    modes = ", ".join(sorted(set(switched.after))) or "nothing"
    said = f"Switch of {heads_in_words(switched.heads)} to {modes}: {switched.outcome}. {switched.reason}"
    return printable(said.strip())
