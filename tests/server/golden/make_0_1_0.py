"""Made the files of golden/0.1.0 out of version 0.1.0 itself; a record of how, since later code cannot make them.

    git worktree add OLD ea6e79e
    PYTHONPATH=OLD/src python -P tests/server/golden/make_0_1_0.py tests/server/golden/0.1.0

exchanges.jsonl.gz: what agents posted and what the service answered: every kind of event, and a real agent under a
small model. store.db.gz: the SQLite file that the service left. answers.json.gz: what it answered its readers before.
agent_state.json: what that real agent saved with a checkpoint.
"""

import gzip
import json
import math
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from foreshock.contract.wire import AgentHealth, Array, Finished, Grams, Switched, Verdict
from foreshock.monitor import attach, sender
from foreshock.server.testing import FakeRank, LiveService

GETS = (
    "/v1/runs",
    "/v1/catalog",
    "/v1/audit?limit=500",
    "/v1/runs/{run}",
    "/v1/runs/{run}/events?limit=500",
    "/v1/runs/{run}/commands?limit=500",
    "/v1/runs/{run}/series?metric=run.loss",
    "/v1/runs/{run}/series?metric=run.grad_norm&max_points=2",
    "/v1/runs/{run}/series?metric=head.score_offset",
    "/v1/runs/{run}/curves?line=run.loss&line=run.worst_risk&line=head.score_max:0&line=head.tied_rows_bf16:1:2",
    "/v1/runs/{run}/curves?line=head.delta_bias:0&line=head.query_norm:1&max_points=2",
    "/v1/runs/{run}/matrix?metric=head.score_offset",
    "/v1/runs/{run}/matrix?metric=head.mode&step=20",
    "/v1/runs/{run}/matrix?metric=head.query_key_norm",
    "/v1/runs/{run}/matrix?metric=head.risk",
)
RUNS = ("golden/ranks", "golden/agent")
exchanges: list[dict[str, Any]] = []


def kept(payload: bytes, status: int, reply: bytes) -> None:
    exchanges.append({"batch": json.loads(payload), "status": status, "reply": json.loads(reply)})


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.num_heads, self.head_dim = 2, 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).view(*x.shape[:2], 2, 8).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)


def agent_of_0_1_0(url: str, out: Path) -> None:
    """Four steps of a real agent, a saved state, and four of the boot that goes on from it."""
    posted = sender._post

    async def recording(client: httpx.AsyncClient, payload: bytes) -> Any:
        status, retry_after, body = await posted(client, payload)
        kept(payload, status, body or b"null")
        return status, retry_after, body

    sender._post = recording
    torch.manual_seed(5)
    state = None
    for _ in range(2):
        model = nn.Sequential(Attention(), Attention())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        agent = attach(
            model, run=RUNS[1], url=url, policy="approve", sample_every_steps=1, sample_every_seconds=0.0,
            norms_every_steps=2, spool_directory=None, send_every_seconds=0.1, labels={"made": "golden"},
        )  # fmt: skip
        if state is not None:
            agent.load_state_dict(state)
        for _ in range(4):
            loss = model(torch.randn(2, 12, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            agent.step(loss, 1.0, 0.1)
        if state is None:
            agent.set_mode([(1, 0)], "exact_delta", "by hand")
            state = agent.state_dict()
            (out / "agent_state.json").write_text(json.dumps(state, indent=1) + "\n")
        agent.close("completed")


class Ranks:
    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.ranks = [FakeRank(run=RUNS[0], rank=rank, boot=f"b{rank}") for rank in (0, 1)]

    def send(self, rank: FakeRank, *events: Any) -> list[Any]:
        payload = rank.batch(*events).model_dump_json().encode()
        answer = self.client.post("/v1/batches", content=payload, headers={"content-type": "application/json"})
        kept(payload, answer.status_code, answer.content)
        assert answer.status_code == 200, answer.text
        return answer.json()["commands"]

    def post(self, path: str, **body: Any) -> Any:
        answer = self.client.post(path, json={"who": "ann", "reason": "golden", **body})
        assert answer.status_code < 300, answer.text
        return answer.json()

    def order(self, **body: Any) -> str:
        return str(self.post(f"/v1/runs/{RUNS[0]}/commands", **body)["id"])

    def answered(self, step: int, outcome: Any = "applied") -> None:
        """Each rank fetches its orders, and answers them."""
        for rank in self.ranks:
            for order in self.send(rank, rank.sample(step)):
                command = sender.wire.Command.model_validate(order)
                self.send(rank, rank.answer(command, step, outcome))

    def play(self) -> None:
        first, second = self.ranks
        norms = {
            name: Array.of(np.arange(1, 7, dtype=np.float32) * scale)
            for name, scale in (("query_norm", 0.5), ("key_norm", 0.25), ("query_key_norm", 2.0))
        }
        for rank in self.ranks:
            self.send(rank, rank.started())
            # eight heads of inputs on each rank: the service adds the two parts up
            triangles = np.random.default_rng(rank.rank).normal(size=(3, 136)).astype(np.float32) ** 2
            gram = {"query": Array.of(triangles), "key": Array.of(triangles + 1)}
            part = Grams(
                step=5, began_step=0, layer=0, heads=(0, 1, 2), head_dim=16, all_inputs=16,
                inputs=(8 * rank.rank, 8 * rank.rank + 8), **gram,
            )  # fmt: skip
            self.send(rank, rank.sample(5, 0), part)
            self.send(rank, rank.sample(10, 5).model_copy(update=norms), rank.sample(20, 10, loss=math.nan))
        self.send(first, first.verdict(20), first.verdict(20, layer=1, head=0, name="warn-2", severity="critical"))
        self.send(first, first.verdict(25, state="updated", forecast_low_steps=900.0, forecast_high_steps=math.inf))
        self.send(first, first.verdict(30, layer=1, head=0, name="warn-2", state="cleared"))
        self.send(first, Verdict.model_validate({**first.verdict(30, name="run").model_dump(), "layer": None,
                  "head": None, "signal": "nonfinite", "cause": "other", "forecast_steps": None}))  # fmt: skip
        self.send(first, AgentHealth(step=30, dropped={"queue_full": 2}, faults={"sender": 1}, retries=3))
        switched = {"step": 30, "heads": ((0, 2),), "before": ("plain",), "after": ("exact_delta",)}
        self.send(first, Switched(id="local-1", outcome="applied", verdict="warn-1", reason="policy auto", **switched))
        self.answered(31)  # the local switch is passed on to rank 1
        undone = self.order(heads=[[0, 1], [1, 1]], mode="exact_delta+stable_softmax", expect="plain")
        self.answered(32)
        self.order(heads=None, mode="paper_softmax")
        self.answered(33, "refused")
        self.order(heads=[[1, 0]], mode="stable_softmax", dry_run=True)
        self.answered(34, "dry_run")
        for number, decision in enumerate(("approve", "reject")):
            ask = {**switched, "heads": ((1, number),), "after": ("stable_softmax",)}
            self.send(first, Switched(id=f"ask-{number}", outcome="proposed", reason="policy approve", **ask))
            proposed = [c for c in self.client.get(f"/v1/runs/{RUNS[0]}/commands").json()["commands"]
                        if c["state"] == "proposed"]  # fmt: skip
            self.post(f"/v1/commands/{proposed[0]['id']}/{decision}")
        self.answered(35)
        self.post(f"/v1/commands/{undone}/undo")
        self.answered(36)
        second.boot, second.sequence = "b1-again", 0
        self.send(second, second.started(step=40), second.sample(50, 40, mode=1), second.sample(60, 50, mode=1))
        self.send(first, first.sample(50, 36, mode=1), first.sample(60, 50, mode=1))
        for rank in self.ranks:
            self.send(rank, rank.sample(1400, 60, mode=1))
        time.sleep(5)  # the first 1024 steps are rolled up
        self.order(heads=[[0, 0]], mode="stable_softmax", expires_in_seconds=1e6)  # never fetched
        self.send(second, Finished(step=1400, unix_seconds=9.0, status="stopped"))


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        with LiveService(Path(folder), {"FORESHOCK_VERIFY_STEPS": "0"}) as service, service.client() as client:
            Ranks(client).play()
            agent_of_0_1_0(service.url, out)
            answers: dict[str, Any] = {}
            for path in (p.format(run=run) for p in GETS for run in RUNS):
                answers[path] = client.get(path).raise_for_status().json()
            answers["/metrics"] = client.get("/metrics").raise_for_status().text
        whole = Path(folder) / "whole.db"
        with sqlite3.connect(Path(folder) / "foreshock.db") as database:
            rolled = database.execute("select count(*) from rollups").fetchone()[0]
            assert rolled, "no roll-up was built"
            database.execute("vacuum into ?", [str(whole)])
        (out / "store.db.gz").write_bytes(gzip.compress(whole.read_bytes(), mtime=0))
    lines = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in exchanges)
    (out / "exchanges.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (out / "answers.json.gz").write_bytes(gzip.compress(json.dumps(answers, indent=1).encode(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
