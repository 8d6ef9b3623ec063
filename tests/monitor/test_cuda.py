"""The agent on a GPU: no host synchronisation in the step, and the same counts as on the CPU."""

import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import CausalSelfAttention, batch, tiny_gpt

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.promise("A14")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_step_with_everything_on_never_waits_for_the_device() -> None:
    torch.manual_seed(0)
    model = tiny_gpt(*(CausalSelfAttention(64, 2) for _ in range(2)), width=64).cuda().bfloat16()
    agent = attach(
        model, sample_every_steps=1, sample_every_seconds=0.0, norms_every_steps=1, strict=True, quiet=True, url=None
    )
    listener = Listener()
    agent.subscribe(listener)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    ids = [batch(step, length=64).cuda() for step in range(12)]
    for step, tokens in enumerate(ids):
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")  # kernels and modules load in the first ones
        try:
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            torch.autograd.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            agent.step(loss, norm, 1e-3)
            if step == 6:
                agent.set_mode([(0, 1)], "exact_delta", "a test")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    agent.close()
    samples = listener.of(wire.Sample)
    assert [s.step for s in samples][-1] == 12
    counted = sum(slot_values(s.words(), Slot.ROWS)[0] for s in samples)
    assert counted == 12 * 2 * 64
    assert all(s.loss is not None and s.grad_norm is not None for s in samples)
    assert samples[-1].modes is not None
    assert samples[-1].modes.numpy().tolist() == [0, 1, 0, 0]
    assert samples[-1].query_norm is not None
    assert (samples[-1].query_norm.numpy() > 0).all()
    assert listener.of(wire.Started)[0].layers[0].served_by == "kernel"
