"""The incidents of a run: listed as text and JSON, acknowledged, approved, rejected and planned to resume from."""

import json

from tests.cli.typed import foreshock
from tests.server.orders import local

from foreshock.contract.wire import Checkpoint
from foreshock.server.testing import FakeRank, LiveService


def test_incidents_are_printed_as_text_or_json_and_can_be_acknowledged(service: LiveService) -> None:
    rank = FakeRank(run="ill", boot="b7")
    service.post(rank.batch(rank.started(), rank.sample(1), rank.verdict(1), rank.verdict(1, head=1, name="warn-2")))
    printed = foreshock("incidents", "ill", "--url", service.url)
    assert printed.exit_code == 0, printed.output
    (incident,) = json.loads(foreshock("incidents", "ill", "--json", "--url", service.url).output)
    assert incident["sentence"] in printed.output
    assert all(head["sentence"] in printed.output for head in incident["heads"])
    assert len(incident["heads"]) == 2
    acknowledge = ["--acknowledge", incident["id"], "--reason", "ann investigates"]
    assert "acknowledged" in foreshock("incidents", "ill", *acknowledge, "--url", service.url).output
    healthy = FakeRank(run="healthy", boot="b8")
    service.post(healthy.batch(healthy.started(), healthy.sample(1)))
    assert foreshock("incidents", "healthy", "--url", service.url).output == "healthy has no incidents.\n"
    assert "To do: " in printed.output
    assert printed.output.startswith("incident rounding: open, warning, since step 1\n")
    without_reason = foreshock("incidents", "ill", "--acknowledge", incident["id"], "--url", service.url)
    assert without_reason.exit_code == 1
    assert "pass both" in without_reason.stderr
    unknown = foreshock("incidents", "ill", "--acknowledge", "nope", "--reason", "x", "--url", service.url)
    assert unknown.exit_code == 1
    assert "nope" in unknown.stderr


def test_manual_switch_and_its_undo_are_listed_with_user_and_step(service: LiveService) -> None:
    rank = FakeRank(run="cut", boot="b9")
    service.post(rank.batch(rank.started(), rank.sample(1)))
    order = {"who": "ada", "reason": "to look", "heads": [[0, 2]], "mode": "exact_delta"}
    with service.client() as client:
        command = client.post("/v1/runs/cut/commands", json=order).json()["id"]
        [sent] = service.post(rank.batch(rank.sample(2))).commands
        service.post(rank.batch(rank.answer(sent, 3)))
        assert "switch layer 0 head 2 to exact_delta: applied at step 3. ada (local): to look" in listed(service)
        client.post(f"/v1/commands/{command}/undo", json={"who": "ada", "reason": "enough"})
        [sent] = service.post(rank.batch(rank.sample(4))).commands
        service.post(rank.batch(rank.answer(sent, 5)))
    printed = listed(service)
    assert "switch layer 0 head 2 to plain: applied at step 5. ada (local): undo: enough" in printed
    assert "exact_delta: applied at step 3, undone since." in printed


def listed(service: LiveService) -> str:
    return str(foreshock("incidents", "cut", "--url", service.url).output)


def test_approve_and_reject_decide_the_proposal_of_an_incident(service: LiveService) -> None:
    for verb, state, code in (("approve", "pending", 3), ("reject", "rejected", 0)):
        rank = FakeRank(run=f"{verb}d", boot="b")
        none = foreshock(verb, rank.run, "--reason", "x", "--url", service.url)
        assert none.exit_code == 1
        service.post(rank.batch(rank.started(policy="approve"), rank.sample(1), rank.verdict(1), local("proposed")))
        (incident,) = json.loads(foreshock("incidents", rank.run, "--json", "--url", service.url).output)
        assert incident["ask"] == "approve"
        options = ["--reason", "seen", "--wait", "0"] if verb == "approve" else ["--reason", "seen"]
        other = foreshock(verb, rank.run, "--command", "nope", *options, "--url", service.url)
        assert (other.exit_code, incident["order"]["id"] in other.stderr) == (1, True)
        done = foreshock(verb, rank.run, *options, "--json", "--url", service.url)
        assert done.exit_code == code, done.stderr
        [command] = json.loads(done.output)["commands"]
        assert (command["id"], command["state"]) == (incident["order"]["id"], state)
        again = foreshock(verb, rank.run, *options, "--url", service.url)
        assert (again.exit_code, f"no proposal waits in run {rank.run}" in again.stderr) == (1, True)
        with service.client() as client:
            events = client.get(f"/v1/runs/{rank.run}/events", params={"kind": "command"}).json()["events"]
        assert f"is {'approved' if verb == 'approve' else 'rejected'} (" in events[0]["sentence"]
        assert events[0]["sentence"].endswith("): seen")


def test_resume_plan_prints_usable_lines_and_a_checkpoint_table(service: LiveService) -> None:
    rank = FakeRank(run="fell", boot="b9")
    saved = [Checkpoint(step=step, path=f"out/checkpoint-{step}", trainer="lightning") for step in (4, 8)]
    service.post(rank.batch(rank.started(), rank.sample(1), *saved, rank.verdict(6)))
    printed = foreshock("resume-plan", "fell", "--url", service.url)
    assert printed.exit_code == 0, printed.output
    assert printed.output.startswith(
        "Resume fell from step 4, out/checkpoint-4. The first open incident began at step 6."
    )
    assert '  trainer.fit(model, ckpt_path="out/checkpoint-4")\n' in printed.output
    rows = [" ".join(line.split()) for line in printed.output.splitlines()]
    assert "8 after a warning out/checkpoint-8" in rows
    assert "4 clean yes out/checkpoint-4" in rows
    plan = json.loads(foreshock("resume-plan", "fell", "--json", "--url", service.url).output)
    assert plan["checkpoint"]["step"] == 4
