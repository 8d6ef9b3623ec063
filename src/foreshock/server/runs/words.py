"""Events in words, for the log, the page and the audit trail."""

from collections.abc import Sequence

from foreshock.contract.wire import Clipped, Finished, HeadRef, Started, Switched


def printable(text: str) -> str:
    """Text without control characters: one line in the log, and storable (PostgreSQL takes no NUL)."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def heads_in_words(heads: Sequence[HeadRef] | None) -> str:
    """layer 0 head 2; at most four by name."""
    if heads is None:
        return "every head"
    named = ", ".join(f"layer {layer} head {head}" for layer, head in heads[:4])
    return named + (f" and {len(heads) - 4} more" if len(heads) > 4 else "") if heads else "no head"


def order_in_words(mode: str, heads: Sequence[HeadRef] | None) -> str:
    """What an order does: switch layer 0 head 2 to row_corrected."""
    return f"switch {heads_in_words(heads)} to {mode}"


def ended_before_the_answer(heads: Sequence[HeadRef] | None) -> str:
    """Why an order is refused that was under way when the last rank that holds its heads ended."""
    left = f"Nobody is left to switch {heads_in_words(heads)}: every rank that could ended before it answered."
    return f"{left} Order it again when the run is resumed."


def started_sentence(rank: int, started: Started) -> str:
    """What a boot watches."""
    heads = sum(len(layer.heads) for layer in started.layers)
    return f"Rank {rank} started at step {started.step}: {len(started.layers)} layers, {heads} heads, {started.policy}."


def shared_sentence(ranks: Sequence[int]) -> str:
    """What it means that two living processes call themselves one rank; at most eight ranks by number."""
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return (
        f"Several living processes call themselves rank {named}: only the newest of each is shown and gets orders. "
        "Give each process a rank of its own (FORESHOCK_RANK), or each training a run of its own (FORESHOCK_RUN)."
    )


def finished_sentence(rank: int, finished: Finished) -> str:
    """How a boot ended."""
    return f"Rank {rank} {finished.status} at step {finished.step}."


def switched_sentence(switched: Switched) -> str:
    """What became of a switch."""
    modes = ", ".join(sorted(set(switched.after))) or "nothing"
    sentence = f"Switch of {heads_in_words(switched.heads)} to {modes}: {switched.outcome}. {switched.reason}"
    if not switched.heads:
        sentence = f"Order {switched.outcome}. {switched.reason}"
    return printable(sentence.strip())


def clipped_sentence(rank: int, clipped: Clipped) -> str:
    """What QK-Clip did: switched on or off, or which heads it scaled, by how much and how often."""
    if not clipped.heads:
        return printable(f"Rank {rank}: QK-Clip is {'on' if clipped.on else 'off'}: {clipped.reason}")
    named = heads_in_words(clipped.heads)
    times = max(clipped.times)
    return printable(
        f"Rank {rank}: QK-Clip scaled {named}, smallest factor {min(clipped.factors):.3g}, "
        f"at most {times:,} time{'s' if times > 1 else ''} each. {clipped.reason}"
    )
