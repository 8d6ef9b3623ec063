"""Report the actual coverage: what computes each layer, which layers count rows, and which stopped counting."""

import itertools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Slot, Words
from foreshock.monitor.attached_model import AttachedModel
from foreshock.monitor.attention.watched_layer import NOT_RUN, outside
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.guard import logger, say
from foreshock.monitor.model.discovery import listed

_SILENT_SAMPLES: Final = 3
_STOPPED: Final = 4
"""A layer counts as stopped when it was silent for this many times the period after which it is reported."""


class CoverageReport:
    """Tracks which layers of one agent count rows, sample by sample."""

    def __init__(self, attached: AttachedModel, config: AgentConfig) -> None:
        self._attached: Final = attached
        self._shows: Final = config.shows
        self._pause: Final = _SILENT_SAMPLES * config.stride
        """If no layer counts for this many steps, another model is probably being trained."""
        self._silent_samples, self._warned_of_silence = 0, False
        self._layers: Final = attached.layers
        self._watched: Final = attached.watched
        self._layouts: Final = {
            layer.name: layout for layer, layout in zip(attached.layers, attached.layouts, strict=True)
        }
        self._found: dict[str, str] = {}
        """Why attention that was found after attach is not watched, by name of its module."""
        self._last: npt.NDArray[np.int64] = np.full(len(self._layers), -1)
        """The step of the last sample in which each layer counted; -1 before the first."""
        self._missed: npt.NDArray[np.int64] = np.zeros(len(self._layers), dtype=np.int64)
        """The number of samples since then in which another layer of the same kind counted."""
        self._first: Final = np.cumsum([0, *(len(layer.heads) for layer in self._layers)])[:-1]
        """The row of each layer's first head; every layer has at least one head."""
        self._silent: set[int] = set()
        """Layers that were reported and have not counted since."""
        self._returns = 0
        """The number of samples in which such a layer counted again."""
        self._outside_before: Final = outside.trained
        self._samples, self._wait, self._next_table = 0, 1, 0
        self._shown: list[str] = []
        self._empty_rows = ""
        """A line about rows of the first sample that do not see any key."""

    def add_unwatched(self, found: Mapping[str, str]) -> None:
        """Add and log attention that was found after attach: the reason why it is not watched, by name of its
        module."""
        for why, alike in itertools.groupby(sorted(found, key=found.__getitem__), found.__getitem__):
            logger.warning("foreshock: the attention of %s is not watched: %s", ", ".join(alike), why)
        self._found |= found

    def _found_now(self) -> dict[str, str]:
        """Return the attention that was found, without modules that a watched one has replaced again."""
        return {name: why for name, why in self._found.items() if name not in self._layouts or self._layouts[name].gone}

    @property
    def table_is_stale(self) -> bool:
        """Whether the states of the layers differ from the last table."""
        return self._samples > 0 and self._shown != self._states()

    def record(self, words: Words, since_step: int, step: int) -> bool:
        """Record a sample's counts [N], and return whether the table has to be shown: for the first sample, and after a
        change, with twice as many samples between two tables each time."""
        counted, first = self._hits(words), not self._samples
        self._samples += 1
        self._silent_samples = 0 if counted.any() else self._silent_samples + 1
        if self._silent_samples:
            self._warn_of_silence(step)
        else:
            self._warned_of_silence = False
        for number in np.flatnonzero(self._last < 0):
            layer = self._watched[number]
            layer.silent = not counted[number] and bool(layer.ran or counted.any())
        self._last[counted] = step
        if first:
            self._note_empty_rows(words)
            self._warn(np.flatnonzero(~counted), step, since_step)
            if (calls := outside.trained - self._outside_before) > 0:
                logger.warning(
                    "foreshock: scaled_dot_product_attention was called %d times outside every watched module; those "
                    "calls are not watched",
                    calls,
                )
        elif not counted.all() or self._silent or self._missed.any():
            self._warn_of_those_that_stopped(counted, since_step, step)
        if not first and (self._samples < self._next_table or not self.table_is_stale):
            return False
        self._wait *= 1 if first else 2
        self._shown, self._next_table = self._states(), self._samples + self._wait
        return True

    def _states(self) -> list[str]:
        """Return the state of each layer as a word, then the names of other attention that was found."""
        stopped = self._missed >= _STOPPED * self._patience
        states = np.where(self._last < 0, "never", np.where(stopped, "stopped", "counts")).astype(object)
        found = self._found_now()
        states[[layer.name in found for layer in self._layers]] = "replaced"
        return [*states.tolist(), *found]

    @property
    def _patience(self) -> int:
        """The number of samples that a layer may miss before it is reported. It grows each time a layer counts again,
        for models that drop layers at random."""
        return 1 << max(self._returns - 1, 0)

    def _hits(self, words: Words) -> npt.NDArray[np.bool_]:
        rows = words[:, Slot.ROWS] | words[:, Slot.EMPTY_ROWS] | words[:, Slot.NONFINITE_ROWS]
        return np.logical_or.reduceat(rows != 0, self._first)

    def _note_empty_rows(self, words: Words) -> None:
        """Prepare a line about rows without a visible key. Most kernels support them, but if NaN appears, they are the
        usual cause."""
        words = words[self._first]
        empty = words[:, Slot.EMPTY_ROWS]
        every = empty + words[:, Slot.ROWS] + words[:, Slot.NONFINITE_ROWS]
        if not empty.any():
            return
        worst = int(np.argmax(empty / np.maximum(every, 1)))
        names = [layer.name for layer, count in zip(self._layers, empty, strict=True) if count]
        self._empty_rows = (
            f"{empty[worst]} of {every[worst]} measured rows of a head see no key ({listed(names)}): the mask hides "
            "every key, as left padding under a causal mask does; if NaN appears, suspect these rows first"
        )

    def _warn_of_silence(self, step: int) -> None:
        """Warn once if no layer has counted for `_pause` steps and several samples."""
        last = int(self._last.max(initial=-1))
        if (
            last >= 0
            and step - last >= self._pause
            and self._silent_samples >= _SILENT_SAMPLES
            and not self._warned_of_silence
        ):
            self._warned_of_silence = True
            logger.warning(
                "foreshock: no attention was recorded since step %d. Either a different model is being trained, or no "
                "backward pass reaches the monitored one. Attach to the model that you train",
                last,
            )

    def warn_if_unstepped(self, words: Words) -> None:
        """Warn that the model was trained but agent.step was never called, when the agent is closed without a step."""
        if self._hits(words).any():
            logger.warning(
                "foreshock: the model was trained, but agent.step(loss) was never called: nothing was judged, sent or "
                "warned about; call it after every optimizer.step()"
            )

    def _warn_of_those_that_stopped(self, counted: npt.NDArray[np.bool_], since_step: int, step: int) -> None:
        sampled = np.array([layer.sampled for layer in self._watched])
        for alike in (sampled, ~sampled):
            if not counted[alike].any() or (alike is sampled and self._attached.last_measured <= since_step):
                # If none counted, nothing was measured in this sample, or there was no backward. If some did, our
                # kernels computed them, before the layers were switched back.
                continue
            self._missed[alike & ~counted] += 1
            self._missed[counted] = 0
            long = np.flatnonzero(alike & (self._missed >= self._patience) & (self._last >= 0)).tolist()
            named = [number for number in long if number not in self._silent]
            since = since_step if self._patience == 1 else int(self._last[named].min(initial=since_step))
            self._warn(named, step, since)
        back = self._silent.intersection(np.flatnonzero(counted).tolist())
        self._silent -= back
        self._returns += bool(back)

    def _warn(self, numbers: Any, step: int, since_step: int) -> None:
        """Log the layers that did not count any rows, grouped by reason."""
        groups: dict[str, list[str]] = {}
        for number in numbers:
            layer, watched = self._layers[number], self._watched[number]
            self._silent.add(int(number))
            counted = self._last[number] >= 0  # then its earlier calls do not explain why it stopped
            why = "; ".join(watched.unmeasured) or NOT_RUN if counted else watched.why_not_counted
            groups.setdefault(why, []).append(f"layer {layer.layer} ({layer.name})")
        steps = f"step {step}" if step - since_step <= 1 else f"steps {since_step + 1} to {step}"
        for why, names in groups.items():
            logger.warning("foreshock: %s counted nothing in %s: %s", ", ".join(names), steps, why)

    def show(self, step: int) -> None:
        """Print the table, if this process prints tables."""
        if self._shows and (table := self.table()):
            say(f"foreshock, from step {step} on:\n{table}")

    def table(self) -> str:
        """Return a table with a line for each group of layers in the same state, and the number of watched layers."""
        if not self._samples:
            return ""
        groups: dict[str, list[str]] = {}
        states, found = self._states(), self._found_now()
        for number, layer in enumerate(self._layers):
            how = self._attached.how_computed(number)
            if states[number] == "replaced":
                continue
            if states[number] == "never":
                how = f"native attention, not measured: {self._watched[number].why_not_counted}"
            elif states[number] == "stopped":
                how = f"{how}; it counted nothing since step {self._last[number]}"
            groups.setdefault(how, []).append(layer.name)
        for name, why in found.items():
            groups.setdefault(f"not monitored: {why}", []).append(name or "the model")
        lines = [f"{len(names)} x {how} ({listed(names)})" for how, names in groups.items()]
        every = len(self._layers) - states.count("replaced") + self._attached.unwatched + len(found)
        if not every:
            return ""
        lines += self._attached.what_a_switch_meets()
        lines += [self._empty_rows] if self._empty_rows else []
        return "\n".join([*lines, f"watched {states.count('counts')} of {every} attention layers"])
