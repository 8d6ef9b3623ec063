"""A small training run in its own process: python -P training.py URL SPOOL ENDING [STEPS].

After ten steps it prints `ready`, its boot and its process id. Then it trains without end (ENDING "never"), until the
spools are sent ("close when sent"), or ends as ENDING says. After each step it appends the step number and the number
of batches that the sender has stored to the file STEPS. Without arguments it reads them from standard input, as JSON,
and forks a process for each line.
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
"""Settings of an agent that samples every step; the line below makes it send every 50 ms."""
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
    """Whether the spools contain unsent batches of dead processes."""
    assert agent._outbox.sender is not None
    return any(len(store) and store.boot != agent.boot for store in agent._outbox.sender._stores)


def main(url: str, spool: str, ending: str, steps: str = os.devnull) -> None:
    """Train with the arguments of the command line."""
    log = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT is ignored in a shell's background job
    handler = signal.getsignal(signal.SIGTERM)
    ended = [0.0]
    # registered before the agent's handler, so it runs after it; the interpreter's own shutdown is not included
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
        raise RuntimeError("an error of the user")
    if ending == "os._exit":
        os._exit(3)
    if ending == "close twice":
        agent.close()
        agent.close("failed")
    if ending == "interrupt":
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def fork_server() -> None:
    """Fork a process for each line, which saves the seconds that the imports take."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap the children automatically
    for line in sys.stdin:
        if os.fork() == 0:
            main(*json.loads(line))
            sys.exit()


if __name__ == "__main__":
    vars(threading)["program"] = sys.modules["__main__"]  # as dill does, so that the globals outlive the modules
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        fork_server()
