/** Orders to switch heads: the form, its confirmation, and the list of orders with their results. */

import { useState } from "preact/hooks";
import { api } from "./api";
import { Dialog, Field, FormEnd, useSending, useWho } from "./dialog";
import type { Head, HeadRef } from "./head";
import type { Catalog, CommandStatus, SwitchPlan } from "./service";
import { steps, words } from "./format";
import { Ago, Name, Swatch } from "./parts";
import type { Loaded } from "./loaded";

type Deed = "approve" | "reject" | "undo" | "cancel";
const VERBS: Record<Deed, string> = { approve: "Approve", reject: "Reject", undo: "Undo", cancel: "Stop" };

export interface SwitchTarget {
  run: string;
  /** null means every head of the run. */
  head: Head | null;
  mode: string | null;
  /** Decide an existing order instead of creating one. */
  decide?: { command: CommandStatus; decision: Deed };
}

/** Asks for a name and a reason, and describes the order before it is sent. */
export function SwitchDialog({ target, catalog, close }: { target: SwitchTarget; catalog: Catalog; close: () => void }) {
  const [every, setEvery] = useState(target.head === null);
  const [chosen, setChosen] = useState((target.mode ?? catalog.default_mode).split("+"));
  const mode = catalog.modes.map(({ name }) => name).filter((name) => chosen.includes(name)).join("+") || "plain";
  const [who, setWho, keep] = useWho();
  const [reason, setReason] = useState("");
  const [dryRun, setDryRun] = useState(false);
  const [confirming, setConfirming] = useState(false);
  /** The changes of an order for all heads, which may be in different modes; the service computes them. */
  const [plan, setPlan] = useState<SwitchPlan | null>(null);
  const [state, send] = useSending();

  const { decide } = target;
  const heads: HeadRef[] | null = every || !target.head ? null : [[target.head.layer, target.head.head]];
  const what = `${decide?.command.what} in ${target.run}`;
  const undo = decide?.decision === "undo";
  const verb = decide && !(undo && dryRun) ? VERBS[decide.decision] : dryRun ? "Try" : "Switch";
  const changes = plan?.changes ?? [{ mode, heads }];
  const sentence = undo
    ? `${dryRun ? "Dry run, which changes nothing: undo" : "Undo"}: ${what}. Each head returns to the mode it had before.`
    : decide?.decision === "cancel"
    ? `Stop: ${what}. Ranks that have not received it yet will not receive it. Heads that are already switched stay switched; you can undo that.`
    : decide?.decision === "reject"
    ? `Reject: ${what}. foreshock will not propose it again until one of these heads has a new warning; you can order a switch at any time.`
    : decide
    ? `${verb}: ${what}.`
    : `${dryRun ? "Dry run, which changes nothing: switch" : "Switch"} ${changes
        .map((change) => `${headNames(change.heads)} of ${target.run} to ${change.mode}`)
        .join(", and ") || "no head"}.${plan?.unchanged.length ? ` Unchanged, because they already combine it with another mode: ${headNames(plan.unchanged)}.` : ""}`;

  const submit = (event: Event) => {
    event.preventDefault();
    if (!confirming) {
      const whole = !decide && heads === null;
      return void send(async () => {
        setPlan(whole ? await api.switches(target.run, mode) : null);
        setConfirming(true);
      });
    }
    keep();
    void send(async () => {
      if (decide?.decision === "undo") await api.undo(decide.command.id, { who, reason, dry_run: dryRun });
      else if (decide) await api.decide(decide.command.id, decide.decision, { who, reason });
      else for (const change of changes) await api.command(target.run, { who, reason, ...change, dry_run: dryRun });
      close();
    });
  };
  return (
    <Dialog title={decide ? `${VERBS[decide.decision]} an order` : "Switch attention"} close={close}>
      <form onSubmit={submit}>
        {confirming ? (
          <div class="confirm">
            <p class="sentence">{sentence}</p>
            <p class="muted">
              {(!decide || decide.command.action === "switch") &&
                "Every mode computes the same attention; modes differ in rounding only. "}
              {decide?.decision !== "cancel" &&
                "The agent applies the order at its next step boundary, and its answer appears here."}
            </p>
            <p class="muted">
              {who}: {reason}
            </p>
          </div>
        ) : (
          <>
            {decide ? (
              <p class="sentence">{sentence}</p>
            ) : (
              <>
                <fieldset>
                  <legend>Heads of {target.run}</legend>
                  {target.head && (
                    <label>
                      <input type="radio" name="heads" checked={!every} onChange={() => setEvery(false)} />
                      layer {target.head.layer} head {target.head.head}
                    </label>
                  )}
                  <label>
                    <input type="radio" name="heads" checked={every} onChange={() => setEvery(true)} />
                    every head
                  </label>
                </fieldset>
                <fieldset>
                  <legend>Mode: {mode}</legend>
                  {catalog.modes.map(({ name, does, cures }) => (
                    <label key={name} title={`${does} ${cures}`}>
                      <input
                        type="checkbox"
                        name="mode"
                        value={name}
                        checked={chosen.includes(name)}
                        onChange={(event) =>
                          setChosen(
                            event.currentTarget.checked
                              ? [...chosen, name]
                              : chosen.filter((other) => other !== name),
                          )
                        }
                      />
                      {name}
                    </label>
                  ))}
                </fieldset>
              </>
            )}
            <Field label="Your name" name="who" value={who} set={setWho} most={128} required />
            <Field label="Reason" name="reason" value={reason} set={setReason} most={500} required />
            {(!decide || undo) && (
              <label class="inline">
                <input
                  type="checkbox"
                  name="dry_run"
                  checked={dryRun}
                  onChange={(event) => setDryRun(event.currentTarget.checked)}
                />
                dry run: the agent says what it would do and changes nothing
              </label>
            )}
          </>
        )}
        <FormEnd
          state={state}
          verb={confirming ? `${verb} now` : "Continue"}
          close={close}
          back={confirming ? () => setConfirming(false) : null}
        />
      </form>
    </Dialog>
  );
}

/** Describes the source of an order if its author's name does not. */
const BY: Record<string, string> = { rank: ", automatically", agent: " proposes" };

/** With a sign, for users who cannot distinguish the colours. */
const VERIFIED = { verified: "✓ growth stopped", "not arrested": "▲ not arrested: growth continues", unknown: "cannot be verified" };

const UNDER_WAY = ["pending", "delivered"];

/** Whether some rank changed the mode of a head, so that it can be undone; a cancelled order may have reached some ranks. */
function standing({ state, ranks }: CommandStatus): boolean {
  return ["applied", "cancelled"].includes(state) && ranks.some(({ before, after }) => before.join() !== after.join());
}

interface CommandsProps {
  commands: readonly CommandStatus[];
  views: readonly Loaded[];
  /** null if the user may only read. */
  onSwitch: ((target: SwitchTarget) => void) | null;
}

/** Proposals of agents that wait for approval. */
export function Approvals({ commands, views, onSwitch }: CommandsProps) {
  const waiting = commands.filter((command) => command.state === "proposed");
  if (!waiting.length) return null;
  return (
    <section aria-label="Approvals">
      <header class="title">
        <h2>Waiting for approval</h2>
      </header>
      <CommandList commands={waiting} views={views} onSwitch={onSwitch} />
    </section>
  );
}

/** All decided orders and their results. */
export function Commands({ commands, views, head, onSwitch }: CommandsProps & { head: Head | null }) {
  const decided = commands.filter((command) => command.state !== "proposed");
  const [only, ...others] = views;
  const orderable = only && onSwitch && !others.length && only.detail.status === "active";
  return (
    <section aria-label="Switches">
      <header class="title">
        <h2>Switches</h2>
        {orderable && (
          <button onClick={() => onSwitch({ run: only.detail.run, head, mode: only.detail.mitigation })}>
            New order
          </button>
        )}
      </header>
      {decided.length === 0 && <p class="note calm">No switch has been ordered.</p>}
      <CommandList commands={decided} views={views} onSwitch={onSwitch} />
    </section>
  );
}

function CommandList({ commands, views, onSwitch }: CommandsProps) {
  const isActive = (run: string) => views.some(({ detail }) => detail.run === run && detail.status === "active");
  const mayDecide = (run: string) => onSwitch !== null && isActive(run);
  const colourOf = (run: string) => views.find((view) => view.detail.run === run)?.colour ?? "";
  const decide = (command: CommandStatus, decision: Deed) =>
    onSwitch?.({ run: command.run, head: null, mode: command.mode, decide: { command, decision } });
  return (
    <ul class="commands">
      {commands.map((command) => (
        <li key={command.id} class={`card command ${command.state}`}>
          <span class="state">{words(command.state)}</span>
          <div>
            <p>
              {views.length > 1 && (
                <>
                  <Swatch colour={colourOf(command.run)} />
                  <Name of={command.run} />:{" "}
                </>
              )}
              {command.what}
              {command.dry_run && " (dry run)"}
              {command.undoes && " (undo)"}
              {command.undone_by && <span class="muted"> undone</span>}
              {command.verification && (
                <span class={`verification ${words(command.verification).replaceAll(" ", "-")}`}>
                  {VERIFIED[command.verification]}
                </span>
              )}
            </p>
            <p class="muted">
              {command.issued_by}
              {BY[command.source] ?? ""}, <Ago at={command.created_unix_seconds} />
              {command.reason && `: ${command.reason}`}
            </p>
            {command.closed_because && <p class="muted">{command.closed_because}</p>}
            {command.ranks
              .filter((rank) => rank.outcome)
              .map((rank) => (
                <p key={rank.rank} class="muted">
                  rank {rank.rank}: {words(rank.outcome!)}
                  {rank.step === null ? "" : ` at step ${steps(rank.step)}`}
                  {rank.reason && !rank.reason.includes(command.reason) && `, ${rank.reason}`}
                </p>
              ))}
          </div>
          {onSwitch && UNDER_WAY.includes(command.state) && (
            <span class="buttons">
              <button onClick={() => decide(command, "cancel")}>Stop</button>
            </span>
          )}
          {command.action === "switch" && standing(command) && !command.undoes && !command.undone_by && mayDecide(command.run) && (
            <span class="buttons">
              <button onClick={() => decide(command, "undo")}>Undo</button>
            </span>
          )}
          {command.state === "proposed" && !isActive(command.run) && (
            <span class="muted">The run has ended, so this can no longer be approved.</span>
          )}
          {command.state === "proposed" && mayDecide(command.run) && (
            <span class="buttons">
              <button onClick={() => decide(command, "reject")}>Reject</button>
              <button onClick={() => decide(command, "approve")}>Approve</button>
            </span>
          )}
        </li>
      ))}
    </ul>
  );
}

function headNames(heads: readonly HeadRef[] | null): string {
  if (!heads) return "every head";
  const names = heads.slice(0, 4).map(([layer, head]) => `layer ${layer} head ${head}`);
  return heads.length > 4 ? `${names.join(", ")} and ${heads.length - 4} more` : names.join(", ");
}
