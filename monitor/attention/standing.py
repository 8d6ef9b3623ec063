"""Tells what is, not what was promised: who serves each layer, which of them count, and which stopped counting."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.contract.slots import Slot, Words
from foreshock.monitor.attention.keep_attention import Keeper
from foreshock.monitor.attention.running import outside
from foreshock.monitor.attention.watched_layer import NOT_RUN, logger
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.model.table import listed

_SILENT_SAMPLES: Final = 3


def pause_steps(config: AgentConfig) -> int:
    """For how many steps no layer may count before that is a sign that another model trains."""
    return _SILENT_SAMPLES * max(config.probe_every_steps, config.sample_every_steps)


class Standing:
    """How the layers of one agent stand, sample by sample. `unwatched` counts attention modules that have no layer;
    `pause` is for how many steps none may count without a word."""

    def __init__(
        self, layers: Sequence[wire.Layer], keeper: Keeper | None, unwatched: int = 0, pause: int | None = None
    ) -> None:
        self._pause: Final = pause
        self._last_counted, self._silent_samples, self._told_of_silence = 0, 0, False
        self._layers: Final = tuple(layers)
        self._keeper: Final = keeper
        self._unwatched: Final = unwatched
        self._counted: npt.NDArray[np.bool_] = np.zeros(len(self._layers), dtype=bool)
        self._first: Final = np.cumsum([0, *(len(layer.heads) for layer in self._layers)])[:-1]
        """Row of each layer's first head; a layer has one at least."""
        self._silent: set[int] = set()
        self._looked = self.settled = False

    def look(self, words: Words, since_step: int, step: int) -> bool:
        """Take note of a sample's counts [N]; whether the table is due: the first one after the proofs."""
        counted = self._hits(words)
        self._silent_samples = 0 if counted.any() else self._silent_samples + 1
        if self._silent_samples:
            self._warn_of_silence(step)
        else:
            self._last_counted, self._told_of_silence = step, False
        if self.settled and not self._silent and self._counted.all() and counted.all():
            return False  # as nearly always: every layer counts, and nothing was told that is over
        self._counted |= counted
        if not self._looked:
            self._looked = True
            self._warn(np.flatnonzero(~counted), step, since_step)
            if outside.calls:
                logger.warning(
                    "foreshock: scaled_dot_product_attention was called %d times outside every watched module; those "
                    "calls are not watched",
                    outside.calls,
                )
        else:
            self._warn_of_those_that_stopped(counted, since_step, step)
        due = not self.settled and (self._keeper is None or not self._keeper.proving)
        self.settled |= due
        return due

    def _hits(self, words: Words) -> npt.NDArray[np.bool_]:
        rows = words[:, Slot.ROWS] | words[:, Slot.EMPTY_ROWS] | words[:, Slot.NONFINITE_ROWS]
        return np.logical_or.reduceat(rows != 0, self._first) if self._layers else np.zeros(0, dtype=bool)

    def _warn_of_silence(self, step: int) -> None:
        """No layer counts any more; told once, when it has lasted. A training whose steps are few samples is left."""
        long = self._pause is not None and step - self._last_counted >= self._pause
        if self._counted.any() and long and self._silent_samples >= _SILENT_SAMPLES and not self._told_of_silence:
            self._told_of_silence = True
            logger.warning(
                "foreshock: no layer counted anything since step %d: another model trains than the one that is "
                "watched, or no backward runs through it; attach to the model that trains",
                self._last_counted,
            )

    def look_unstepped(self, words: Words) -> None:
        """The agent closes and was told of no step: whoever trained the model forgot it."""
        if self._hits(words).any():
            logger.warning(
                "foreshock: the model was trained, but agent.step(loss) was never called: nothing was judged, sent or "
                "warned about; call it after every optimizer.step()"
            )

    def _warn_of_those_that_stopped(self, counted: npt.NDArray[np.bool_], since_step: int, step: int) -> None:
        layers = [self._watched(number) for number in range(len(self._layers))]
        sampled = np.array([layer is not None and layer.sampled for layer in layers])
        for alike in (sampled, ~sampled):
            if not counted[alike].any():
                continue  # none of them: nothing was measured in this sample, or there was no backward
            stopped = set(np.flatnonzero(alike & ~counted).tolist())
            self._warn([n for n in sorted(stopped - self._silent) if self._counted[n]], step, since_step)
            self._silent = (self._silent | stopped) - set(np.flatnonzero(counted).tolist())

    def _warn(self, numbers: Any, step: int, since_step: int) -> None:
        """Name the layers that counted nothing, those of one reason together."""
        groups: dict[str, list[str]] = {}
        for number in numbers:
            layer, watched = self._layers[number], self._watched(number)
            self._silent.add(int(number))
            if watched is None or self._counted[number]:  # what it met before tells nothing of now
                why = "; ".join(watched.unserved if watched is not None else ()) or NOT_RUN
            else:
                why = watched.silence
            groups.setdefault(why, []).append(f"layer {layer.layer} ({layer.name})")
        steps = f"step {step}" if step - since_step <= 1 else f"steps {since_step + 1} to {step}"
        for why, names in groups.items():
            logger.warning("foreshock: %s counted nothing in %s: %s", ", ".join(names), steps, why)

    def _watched(self, number: int) -> Any:
        return None if self._keeper is None else self._keeper.layers[number]

    def table(self) -> str:
        """A line for each group of layers that stand alike, and how many are watched in all."""
        if self._keeper is None or not self._looked:
            return ""
        groups: dict[str, list[str]] = {}
        for number, layer in enumerate(self._layers):
            how = self._keeper.standing(number)
            if not self._counted[number]:
                how = f"kept, not measured: {self._watched(number).silence}"
            groups.setdefault(how, []).append(layer.name)
        lines = [f"{len(names)} x {how} ({listed(names)})" for how, names in groups.items()]
        every = len(self._layers) + self._unwatched
        lines += self._keeper.refused_mitigation()
        return "\n".join([*lines, f"watched {int(self._counted.sum())} of {every} attention layers"])
