"""A small training run for tests that need a process of their own: python -P training.py URL SPOOL ENDING [STEPS].

Prints `ready`, its boot and its process when it has made ten steps, goes on for ever (ENDING "never"), until the
spools are sent ("close when sent") or ends as told. To the file STEPS it writes each step's number and how many batches
the sender has kept by its end. Without arguments it reads them from its standard input, as JSON, and forks a life for
each line.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from typing import Any, Final

import torch
from torch import Tensor, nn

from foreshock.monitor import Agent, AgentConfig, attach

BUSY: Final[dict[str, Any]] = {
    "sample_every_steps": 1,
    "quiet": True,
}
"""An agent that samples every step, and, by the line below, sends at once."""
AgentConfig.send_every_seconds = 0.05


class Attention(nn.Module):
    """One causal layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.num_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return y.transpose(1, 2).flatten(2)


def waiting(agent: Agent) -> bool:
    """Whether batches of dead processes wait in the spools."""
    assert agent._outbox.sender is not None
    return any(len(store) and store.boot != agent.boot for store in agent._outbox.sender._stores)


def main(url: str, spool: str, ending: str, steps: str = os.devnull) -> None:
    """Train as the command line says."""
    log = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    handler = signal.getsignal(signal.SIGTERM)
    ended = [0.0]
    # registered before the agent's, so it runs after it: what the interpreter itself takes to leave is not counted
    atexit.register(lambda: print("left after", time.monotonic() - ended[0], flush=True))
    model = Attention()
    agent = attach(
        model,
        run="a-run",
        url=url,
        spool_directory=spool,
        **BUSY,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while step < 10 or ending == "never" or (ending == "close when sent" and waiting(agent)):
        loss = model(torch.ones(1, 4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        agent.step(loss)
        step += 1
        assert agent._outbox.sender is not None
        os.write(log, f"{step} {agent._outbox.sender._sequence}\n".encode())
        if step == 10:
            time.sleep(0.2)  # the sender is in the middle of a request
            print("ready", agent.boot, os.getpid(), flush=True)
        time.sleep(0.002)
    assert signal.getsignal(signal.SIGTERM) is handler
    ended[0] = time.monotonic()
    if ending == "exit":
        sys.exit(3)
    if ending == "raise":
        raise RuntimeError("the user's own fault")
    if ending == "os._exit":
        os._exit(3)
    if ending == "close twice":
        agent.close()
        agent.close("failed")
    if ending == "interrupt":
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def lives() -> None:
    """Fork a process for each line: a life of its own, without the seconds that the imports take."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        if os.fork() == 0:
            main(*json.loads(line))
            sys.exit()


if __name__ == "__main__":
    vars(threading)["program"] = sys.modules["__main__"]  # as dill does, so that its globals outlive our modules
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        lives()
