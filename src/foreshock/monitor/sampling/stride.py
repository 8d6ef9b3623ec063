"""Which steps are sampled and measured: those that pass a multiple of a number."""


def passes(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` is in (before, after], so that numbers that skip some meet each stride once."""
    return after // every > before // every
