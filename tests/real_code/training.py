"""One training of a case, with foreshock or without, in a process of its own.

FOLDER is the snapshot of the repository; FILE receives losses, weights, scores and every line that foreshock printed.
"""

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tests.real_code.case import EVERY, SAMPLED, STEPS, SWITCH_AT
from tests.real_code.cases import CASES
from tests.real_code.course import Course
from tests.real_code.truth import recorded_scores
from torch import Tensor, nn

import foreshock
from foreshock.contract import wire

logger: Final = logging.getLogger("foreshock")


class EnoughError(BaseException):
    """All steps are done; no trainer catches it."""


class _Handler(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines += record.getMessage().splitlines()


class Without:
    """Records a training, and the scores of its attention."""

    def __init__(self, course: Course, recorder: contextlib.ExitStack) -> None:
        self.course, self._recorder = course, recorder
        self._model: nn.Module

    def attach(self, model: nn.Module, **_: Any) -> None:
        self._model = model
        note = lambda: self.course.scores.setdefault(self.next_step, {}) if self.next_step in SAMPLED else None  # noqa: E731
        self._recorder.enter_context(recorded_scores(model, note))

    @property
    def next_step(self) -> int:
        return len(self.course.losses) + 1

    def step(self, loss: Tensor) -> None:
        self.course.losses.append(float(loss.detach()))
        self._after(loss)
        if len(self.course.losses) == SWITCH_AT:
            self.course.weights, self.course.random_state = _state(self._model), torch.get_rng_state()
        if len(self.course.losses) == STEPS:
            raise EnoughError

    def _after(self, loss: Tensor) -> None:
        """Nothing follows a step without foreshock."""


class With(Without):
    """Trains with foreshock and orders a switch of every head."""

    _agent: foreshock.Agent

    def attach(self, model: nn.Module, **given: Any) -> None:
        self._model = model
        with self._listening():
            self._agent = foreshock.attach(
                model,
                run="real-code",
                spool_directory=None,
                sample_every_seconds=0,
                sample_every_steps=EVERY,
                norms_every_steps=1,
                **given,
            )
        self._agent.subscribe(self._take)
        self._recorder.callback(self._close)

    def _take(self, event: wire.Event) -> None:
        if isinstance(event, wire.Sample):
            self.course.samples.append(event)
        elif isinstance(event, wire.Switched):
            self.course.answers.append(event)

    def _after(self, loss: Tensor) -> None:
        step = len(self.course.losses)
        if step in SAMPLED:
            self.course.states[step] = _state(self._model)
        with self._listening():
            self._agent.step(loss.detach())
        if step == SWITCH_AT:
            self.course.layers = list(self._agent._attached.layers)
            try:
                answer = self._agent.set_mode(self._agent.modes(), "row_corrected", reason="by hand")
            except ValueError as refusal:
                self.course.refused_at_once = str(refusal)
            else:
                if answer is not None and answer not in self.course.answers:
                    self.course.answers.append(answer)

    def _close(self) -> None:
        with self._listening():
            self.course.faults = dict(self._agent.faults)
            self._agent.close()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        with contextlib.redirect_stderr(said := io.StringIO()):
            yield
        self.course.lines += said.getvalue().splitlines()


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def train(run: Callable[[Any], None], *, watched: bool) -> Course:
    """The course of one training."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    course = Course()
    logger.propagate = False
    logger.addHandler(handler := _Handler(course.lines))
    with contextlib.ExitStack() as stack:
        stack.callback(logger.removeHandler, handler)
        try:
            run((With if watched else Without)(course, stack))
            course.ended = "the training ended by itself"
        except EnoughError:
            pass
        except ModuleNotFoundError as missing:
            course.ended = f"cannot be imported: {missing}"
        except Exception as crash:
            course.ended = f"{type(crash).__name__}: {str(crash)[:300]}"
            traceback.print_exc()
    return course


def _make_torchvision_importable() -> None:
    """A torchvision that was built for CUDA cannot be imported on a PyTorch without it, for want of operators that no
    case calls."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def train_one(arguments: list[str]) -> None:
    """Train as the command says."""
    parser = argparse.ArgumentParser(prog="run_tests_of.py real_code train", description=__doc__)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("way", choices=("with", "without"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    asked = parser.parse_args(arguments)
    case = CASES[asked.case]
    torch.set_num_threads(1)
    # Code generation for a CPU takes minutes; tests/monitor trains compiled models.
    torch.compiler.set_stance("force_eager")
    _make_torchvision_importable()
    os.chdir(asked.folder / case.folder)
    sys.path.insert(0, str(Path.cwd()))
    torch.save(train(case.train, watched=asked.way == "with"), asked.file)
