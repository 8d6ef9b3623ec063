"""Mixtures of experts and models that normalise queries and keys, in bf16: on a CPU, and on a GPU where there is one.

They train, eagerly and under torch.compile with lengths that change, as they do without foreshock.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from tests.monitor.resumed_courses import SAMPLED, Course
from tests.monitor.test_foreign_models import DECODER, tiny
from torch import Tensor, nn
from torch._dynamo.utils import counters

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach

pytestmark = [
    # PyTorch's own advice, what it has no deterministic kernel for, and what it calls of its own that is on its way out
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ROWS, STEPS = 2, 20
LENGTHS = {"cpu": (12, 9, 11, 7), "cuda": (200, 120, 250, 77)}
SIZES: dict[str, dict[str, Any]] = {
    "cpu": DECODER,
    "cuda": DECODER | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "max_position_embeddings": 256},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Qwen3": {},
    "Olmo2": {},
}
DEVICES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.fixture(autouse=True)
def _two_trainings_without_us_are_the_same(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


def model(kind: str, device: str, **sizes: Any) -> Any:
    made = tiny(kind, **{**SIZES[device], **EXPERTS[kind], **sizes}).train()
    return made.to(device, torch.bfloat16)


def tokens(step: int, device: str, length: int) -> Tensor:
    return torch.randint(3, 90, (ROWS, length), generator=torch.Generator().manual_seed(step)).to(device)


def course_of(
    kind: str,
    device: str,
    way: str,
    lengths: tuple[int, ...],
    around: Callable[[nn.Module], Any] = lambda model: model,
    each: Callable[[Tensor], None] = lambda ids: None,
) -> Course:
    """STEPS steps, of lengths that repeat."""
    course, trained = Course(way), model(kind, device)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    agent = None if course.settings is None else attach(trained, **course.settings)
    course.begins(agent, trained)
    with course.attention():
        running = around(trained)
        for step in range(STEPS):
            ids = tokens(step, device, lengths[step % len(lengths)])
            each(ids)
            loss = running(input_ids=ids, labels=ids).loss
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            course.told["losses"].append(float(loss.detach()))
            if agent is not None:
                agent.step(loss)
            course.stepped()
    if agent is not None:
        agent.close()
    course.ends(trained, STEPS)
    return course


def rows_of(course: Course) -> set[int]:
    """Rows counted of each head over all samples."""
    return set(np.sum([slot_values(w, Slot.ROWS) for w in course.told["words"]], axis=0).astype(int).tolist())


def expected_rows(way: str, device: str, lengths: tuple[int, ...]) -> int:
    every = [ROWS * lengths[step % len(lengths)] for step in range(STEPS)]
    return sum(every) if way == "kernels" else SAMPLED * STEPS


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "device"),
    [
        *(pytest.param(kind, "cuda", marks=DEVICES[1].marks) for kind in EXPERTS),
        *(pytest.param(kind, "cpu") for kind in ("Qwen3Moe", "Olmo2")),
    ],
)
def test_twenty_steps_are_those_without_us_as_far_as_these_repeat_and_every_layer_is_counted(
    kind: str, device: str
) -> None:
    lengths = LENGTHS[device][:1]
    ways = {"keep": "plain", "kernels": "operator"}
    expected = {way: course_of(kind, device, way, lengths) for way in dict.fromkeys(ways.values())}
    allowed = apart(course_of(kind, device, "plain", lengths), expected["plain"])  # 0 where PyTorch is deterministic
    for way, reference in ways.items():
        got = course_of(kind, device, way, lengths)
        assert apart(got, expected[reference]) <= 4 * allowed, f"{way} against {reference}, {allowed} is PyTorch's own"
        assert rows_of(got) == {expected_rows(way, device, lengths)}
        assert "watched 2 of 2 attention layers" in got.told["reports"][0]
        assert ("2 x kernels" in got.told["reports"][0]) == (way == "kernels")


def apart(one: Course, other: Course) -> float:
    """The largest difference of losses and weights."""
    pairs = zip(one.told["weights"], other.told["weights"], strict=True)
    weights = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    losses = np.abs(np.subtract(one.told["losses"], other.told["losses"]))
    return max(weights, float(losses.max()))


HOW = ("whole, dynamic", "whole, marked", "layer by layer")


def compiled(device: str, how: str) -> Callable[[nn.Module], Any]:
    """Inductor where there is a GPU; on a CPU its code generation takes too long."""
    options: dict[str, Any] = {"backend": "inductor" if device == "cuda" else "aot_eager"}
    if how != "whole, marked":
        options["dynamic"] = True

    def around(trained: Any) -> Any:
        torch._dynamo.reset()
        counters.clear()
        if how != "layer by layer":
            return torch.compile(trained, **options)
        for layer in trained.model.layers:
            layer.compile(**options)
        return trained

    return around


def passes_a_mask(kind: str, device: str) -> bool:
    """Whether the model, compiled whole, gives PyTorch's attention a mask in the place of is_causal, as transformers
    does that cannot tell compilation from export; then its attention is kept."""
    masks: list[bool] = []

    def look(graph: Any, inputs: Any) -> Any:
        calls = [node for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention]
        masks.extend(node.kwargs.get("attn_mask") is not None for node in calls)
        return graph.forward

    ids = tokens(0, device, LENGTHS[device][0])
    running: Any = torch.compile(model(kind, device), backend=look, dynamic=True)
    running(input_ids=ids)
    torch._dynamo.reset()
    (passes,) = set(masks)
    return passes


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "way", "how", "device"),
    [
        pytest.param("Olmo2", "kernels", "layer by layer", "cpu"),
        *(
            pytest.param(kind, way, how, *device.values, marks=device.marks)
            for device in DEVICES[1:]
            for kind in EXPERTS
            for way in ("keep", "kernels")
            for how in HOW
        ),
    ],
)
def test_lengths_that_change_under_compile_break_no_graph_and_make_few(
    kind: str, way: str, how: str, device: str
) -> None:
    lengths = LENGTHS[device]
    graphs: list[int] = []

    def each(ids: Tensor) -> None:
        graphs.append(counters["stats"]["unique_graphs"])
        if how == "whole, marked":
            torch._dynamo.mark_dynamic(ids, 1)

    def course(way: str) -> tuple[Course, int, int, dict[str, int]]:
        graphs.clear()
        with torch._inductor.config.patch(emulate_precision_casts=True):  # or fusion decides where is rounded
            done = course_of(kind, device, way, lengths, compiled(device, how), each)
        return done, graphs[2 * len(lengths)], counters["stats"]["unique_graphs"], dict(counters["graph_break"])

    try:
        plain, _, without_us, breaks = course("plain")
    except Exception as error:
        pytest.skip(f"torch.compile cannot do it without foreshock: {type(error).__name__}: {str(error)[:200]}")
    got, early, made, broken = course(way)
    served = way == "kernels" and (how == "layer by layer" or not passes_a_mask(kind, device))
    assert sum(broken.values()) <= sum(breaks.values()), broken
    assert made == early, "torch.compile made graphs in later steps"
    assert made <= without_us
    assert rows_of(got) == {expected_rows(way if served else "keep", device, lengths)}
    # What serves is what it is compared with: other attention rounds otherwise, and a token then goes to other experts.
    expected = course("operator")[0] if served else plain
    if device == "cpu":
        assert apart(got, expected) == 0
        return
    # Inductor fuses, and so rounds, what surrounds the attention as it likes: as far from eager as it is without us.
    eager = course_of(kind, device, "plain", lengths)
    own = np.abs(np.subtract(plain.told["losses"], eager.told["losses"])).max()
    rounding = torch.finfo(torch.bfloat16).eps * max(plain.told["losses"])
    assert np.abs(np.subtract(got.told["losses"], expected.told["losses"])).max() <= 4 * own + rounding


def output_and_gradients(trained: Any, running: Any, ids: Tensor) -> dict[str, Tensor]:
    trained.zero_grad()
    logits = running(input_ids=ids).logits
    weights = torch.linspace(-1, 1, logits.numel(), device=ids.device, dtype=torch.float64).view_as(logits)
    torch.autograd.backward(logits, weights.to(logits.dtype))
    gradients = {name: p.grad.double() for name, p in trained.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().double(), **gradients}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "mode", "device"),
    [
        *(pytest.param(kind, "eager", *d.values, marks=d.marks) for kind in EXPERTS for d in DEVICES),
        *(pytest.param(kind, "compiled", "cuda", marks=DEVICES[1].marks) for kind in EXPERTS),
    ],
)
def test_the_kernels_bring_output_and_gradients_no_farther_from_float64(kind: str, mode: str, device: str) -> None:
    # all experts serve every token: which ones are chosen is not continuous
    chosen = {"num_experts_per_tok": 4} if EXPERTS[kind] else {}
    around = compiled(device, "layer by layer") if mode == "compiled" else lambda trained: trained
    ids = [tokens(step, device, length) for step, length in enumerate(LENGTHS[device])]

    def results(way: str, listener: Listener) -> dict[str, Tensor]:
        trained = model(kind, device, **chosen)
        if way == "truth":
            trained.double()
            if EXPERTS[kind]:
                trained.set_experts_implementation("eager")  # the others are for 16 bits
            return output_and_gradients(trained, trained, ids[-1])
        agent = attach(trained, **Course("kernels").settings) if way == "kernels" else None  # type: ignore[arg-type]
        running = around(trained)
        for given in ids:
            found = output_and_gradients(trained, running, given)
        if agent is not None:
            agent.subscribe(listener)
            agent.step(1.0)
            agent.close()
        return found

    listener = Listener()
    truth, own, ours = (results(way, listener) for way in ("truth", "plain", "kernels"))
    unit = torch.finfo(torch.bfloat16).eps / 2
    for name, true in truth.items():
        allowed = 4 * float((own[name] - true).norm()) + 2 * unit * float(true.norm())
        assert float((ours[name] - true).norm()) <= allowed, name
    assert not all(torch.equal(ours[name], own[name]) for name in truth)
    (sample,) = listener.of(wire.Sample)
    assert set(slot_values(sample.words(), Slot.ROWS).tolist()) == {ROWS * sum(LENGTHS[device])}
