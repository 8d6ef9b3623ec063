"""How far a sample of rows may be from all rows of a head, and what verdicts say of it."""

from collections.abc import Mapping, Sequence

import numpy as np

from foreshock.contract import wire
from foreshock.contract.metrics.catalog import read
from foreshock.contract.metrics.metric import ratio
from foreshock.contract.slots import Floats, Slot, Words, looked_at, slot_values


def sampling_errors(words: Words) -> dict[str, Floats]:
    """Standard errors of what a sample of rows shows of each head, [N], NaN where it measured none.

    offset_error of the mean of lse - log n, in nats; tied_bf16_error of the share of rows with several maxima. It is
    s / sqrt(n), as of rows drawn one by one: those of one sequence may be alike, and those of different stretches of it
    differ. They speak of the steps that were measured.
    """
    rows = slot_values(words, Slot.ROWS)
    share = read("head.tied_rows_bf16", words)
    variance = np.maximum(read("head.score_offset_rms", words) ** 2 - read("head.score_offset", words) ** 2, 0.0)
    return {
        "offset_error": np.sqrt(ratio(variance, rows)),
        "tied_bf16_error": np.sqrt(ratio(share * (1 - share), looked_at(words))),
    }


def with_errors(
    verdicts: Sequence[wire.Verdict], errors: Mapping[str, Floats], heads: Sequence[wire.HeadRef]
) -> list[wire.Verdict]:
    """`verdicts` with the sampling errors of their heads in the evidence; `errors` [N] are those of `heads`."""
    rows: dict[tuple[int | None, int | None], int] = {head: row for row, head in enumerate(heads)}
    described = []
    for verdict in verdicts:
        row = rows.get((verdict.layer, verdict.head))
        known = {} if row is None else {k: float(v[row]) for k, v in errors.items() if not np.isnan(v[row])}
        described.append(verdict.model_copy(update={"evidence": {**verdict.evidence, **known}}) if known else verdict)
    return described
