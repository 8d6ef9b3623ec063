/** Incidents: one card for related warnings, with the most urgent head, and the other heads on demand. */

import { useState } from "preact/hooks";
import { api } from "./api";
import { useWho } from "./dialog";
import { number, PAST, roundTo2, steps, words } from "./format";
import type { Head } from "./head";
import type { Loaded } from "./loaded";
import { ErrorNote, Name, Swatch } from "./parts";
import { useResource } from "./resource";
import type { Incident, IncidentHead } from "./service";
import { Sparkline } from "./sparkline";
import type { SwitchTarget } from "./switch";

interface Props {
  views: readonly Loaded[];
  compare: boolean;
  onShow: (head: Head) => void;
  /** null if the user may only read. */
  onSwitch: ((target: SwitchTarget) => void) | null;
}

interface Item {
  view: Loaded;
  incident: Incident;
}

type ItemProps = Item & Omit<Props, "views">;

/** On a phone the evidence is collapsed, so that the charts stay near. */
const WIDE = matchMedia("(min-width: 700px)");
const CHECKPOINTS_SHOWN = 5;
const URGENCY = ["critical", "warning", "info"];

/** The most urgent incident in full and the others collapsed, so that the charts stay on the screen. */
export function Incidents({ views, compare, onShow, onSwitch }: Props) {
  const all = views.flatMap((view) => view.incidents.map((incident): Item => ({ view, incident })));
  const open = all.filter(({ incident }) => incident.state !== "closed");
  open.sort((a, b) => urgency(a) - urgency(b) || left(a) - left(b));
  const [first, ...others] = open;
  /** A non-finite loss is critical even if the agent did not warn about it. */
  const broken = views.filter(
    ({ detail, incidents }) =>
      detail.loss !== null && !Number.isFinite(detail.loss) && !incidents.some(({ cause, state }) => cause === "not finite" && state !== "closed"),
  );
  const given = { compare, onShow, onSwitch };
  return (
    <section aria-label="Warnings" aria-live="polite">
      {!first && !broken.length && <p class="note calm">No active warning.</p>}
      {broken.map(({ detail }) => (
        <p key={detail.run} class="note error" role="alert">
          {compare && `${detail.run}: `}The loss is {number(detail.loss)}, but its agent has not raised a warning.{" "}
          {detail.status === "active" ? "Stop the run and resume it" : "Resume it"} from a checkpoint before that.
        </p>
      ))}
      {first && <Card key={`${first.view.detail.run} ${first.incident.id}`} {...first} {...given} />}
      {others.length > 0 && (
        <details class="more">
          <summary>
            {others.length} more {others.length > 1 ? "incidents" : "incident"}
          </summary>
          {others.map((item) => (
            <Card key={`${item.view.detail.run} ${item.incident.id}`} {...item} {...given} compare={true} />
          ))}
        </details>
      )}
    </section>
  );
}

const urgency = ({ incident }: Item) => (incident.state === "arrested" ? 9 : URGENCY.indexOf(incident.severity));
const left = ({ incident }: Item) => incident.steps_left ?? Infinity;

/** If several runs are compared (`compare`), the numbers are collapsed in favour of the charts. */
function Card({ view, incident, compare, onShow, onSwitch }: ItemProps) {
  const first = incident.heads[0]!;
  const mode = modeOf(view, first);
  const { run } = view.detail;
  return (
    <article class={`card warning warnings ${incident.severity}`}>
      <header>
        <span class="severity" data-level={incident.severity}>
          {incident.state === "arrested" ? "arrested" : incident.severity}
        </span>
        {compare && (
          <span class="run">
            <Swatch colour={view.colour} />
            <Name of={run} />
          </span>
        )}
        <span class="muted">
          {incident.causes.join(" and ")} · {incident.standing > 1 ? counted(incident) : where(first)} · since step{" "}
          {steps(incident.opened_step)}
          {incident.corrected_from && ` · until step ${steps(incident.corrected_step!)} reported as ${incident.corrected_from}`}
          {incident.times > 1 && ` · ${incident.times} times in this run`}
        </span>
        {mode !== "plain" && <span class="switched">◆ now {mode}</span>}
        {incident.state !== "open" && <span class="standing">{incident.state}</span>}
        {incident.acknowledged && <span class="muted">acknowledged by {incident.acknowledged.who}</span>}
      </header>
      <p class="sentence">{incident.standing > 1 ? incident.sentence : first.sentence || incident.sentence}</p>
      <p class="left">
        {first.layer !== null && first.head !== null && (
          <Sparkline run={run} line={`head.score_offset:${first.layer}:${first.head}`} label={`score offset of ${where(first)}`} />
        )}
        {foreseen(incident) && first.layer !== null && (
          <>
            <span class="muted">Steps left{incident.standing > 1 ? ` of ${where(first)}` : ""} until the largest |score| is 512:</span>{" "}
            <b>{forecast(first)}</b>
          </>
        )}
      </p>
      <p class="to-do">
        <span class="muted">{incident.done}</span> {incident.to_do !== "Nothing." && (
          <b>
            {incident.to_do}
          </b>
        )}
      </p>
      <details open={!compare && incident.standing === 1 && WIDE.matches}>
        <summary>Evidence{incident.standing > 1 && ` of ${where(first)}`}</summary>
        {incident.standing > 1 && <p class="told">{first.sentence}</p>}
        <dl class="evidence">
          {Object.entries(first.evidence).map(([name, value]) => (
            <div key={name}>
              <dt title={words(name)}>{words(name)}</dt>
              <dd>{number(value)}</dd>
            </div>
          ))}
        </dl>
      </details>
      {incident.heads.length > 1 && <Heads {...{ view, incident, onShow, onSwitch }} />}
      <Resume run={run} />
      <footer>
        <Buttons {...{ view, incident, onShow, onSwitch }} />
      </footer>
    </article>
  );
}

/** Whether scores grow; any other cause has already done harm. */
function foreseen({ cause }: Incident): boolean {
  return cause !== "not finite" && cause !== "attention kernel";
}

/** All heads of an incident, grouped by layer; fewest steps left first. */
function Heads({ view, incident, onShow, onSwitch }: Omit<ItemProps, "compare">) {
  const [open, setOpen] = useState(false);
  const layers = Map.groupBy(incident.heads, ({ layer }) => layer);
  const named = incident.heads.filter(({ layer }) => layer !== null).length;
  const several = layers.size - Number(layers.has(null));
  return (
    <details onToggle={(event) => event.currentTarget === event.target && setOpen(event.currentTarget.open)}>
      <summary>
        {layers.has(null) && "The whole run and "}
        {named} {named === 1 ? "head" : "heads"} in {several} {several === 1 ? "layer" : "layers"}
        {foreseen(incident) && ", fewest steps left first"}
      </summary>
      {open && (
        <div class="scroll">
          {[...layers].map(([layer, heads]) => (
            <details class="layer" key={layer}>
              <summary>
                {layer === null ? "whole run" : `layer ${layer}: ${heads.length > 1 ? `${heads.length} heads` : "1 head"}`}
                {foreseen(incident) && `, ${forecast(heads[0]!)}`}
              </summary>
              <ul>
                {heads.map((head) => (
                  <li key={head.head} title={head.sentence}>
                    <span class="severity" data-level={head.severity}>
                      {where(head)}
                    </span>
                    <span class="muted">
                      {forecast(head)} · since step {steps(head.raised_step)}
                      {incident.causes.length > 1 && ` · ${head.causes.join(" and ")}`}
                      {head.state !== "unswitched" && ` · ${head.state}`}
                    </span>
                    <HeadButtons {...{ view, head, onShow, onSwitch }} />
                  </li>
                ))}
              </ul>
            </details>
          ))}
        </div>
      )}
    </details>
  );
}

/** The checkpoint to resume from and the lines to change in the training program; loaded when opened. */
function Resume({ run }: { run: string }) {
  const [open, setOpen] = useState(false);
  const plan = useResource(() => api.resumePlan(run), run, { on: (wake) => wake.run === run && wake.kind === "event", seen: open });
  return (
    <details class="resume" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Resume plan</summary>
      {plan.error && <ErrorNote error={plan.error} />}
      {plan.data && (
        <>
          <p class="told">{plan.data.sentence}</p>
          {plan.data.commands.length > 0 && (
            <pre tabIndex={0} role="group" aria-label="lines to run or to write into the program">
              {plan.data.commands.join("\n")}
            </pre>
          )}
          {plan.data.checkpoints.length > 0 && (
            <ul>
              {plan.data.checkpoints.slice(0, CHECKPOINTS_SHOWN).map(({ step, path, label, pinned }) => (
                <li key={path}>
                  step {steps(step)}: {label}
                  {pinned && ", keep"} <span class="muted">{path}</span>
                </li>
              ))}
            </ul>
          )}
        </>
      )}
    </details>
  );
}

interface HeadProps extends Omit<Props, "views" | "compare"> {
  view: Loaded;
  head: IncidentHead;
}

function HeadButtons({ view, head: { layer, head, causes }, onShow, onSwitch }: HeadProps) {
  if (layer === null || head === null) return null;
  return (
    <span class="buttons">
      <button onClick={() => onShow({ layer, head })}>Show</button>
      {onSwitch && view.detail.status === "active" && causes.includes("rounding") && (
        <button onClick={() => onSwitch({ run: view.detail.run, head: { layer, head }, mode: view.detail.mitigation })}>
          Switch
        </button>
      )}
    </span>
  );
}

/** The first button does what the bold sentence recommends; the others are alternatives. */
function Buttons({ view, incident, onShow, onSwitch }: Omit<ItemProps, "compare">) {
  const first = incident.heads[0]!;
  const { layer, head } = first;
  const { run, status, mitigation } = view.detail;
  const proposal = view.commands.find(({ id, state }) => id === incident.order?.id && state === "proposed");
  const approves = incident.ask === "approve" && proposal;
  const acts = onSwitch !== null && status === "active";
  const mode = modeOf(view, first);
  const cures = incident.heads.some(({ causes, state }) => causes.includes("rounding") && state === "unswitched");
  const named = layer !== null && head !== null;
  return (
    <>
      <span class="buttons">
        {acts && approves && (
          <button
            class="primary"
            onClick={() => onSwitch({ run, head: null, mode: proposal.mode, decide: { command: proposal, decision: "approve" } })}
          >
            Approve
          </button>
        )}
        {acts && cures && (
          <button class={incident.ask === "switch" ? "primary" : ""} onClick={() => onSwitch({ run, head: null, mode: mitigation })}>
            Switch every head
          </button>
        )}
        {named && <button onClick={() => onShow({ layer, head })}>Show this head</button>}
        {acts && named && ((cures && first.causes.includes("rounding")) || mode !== "plain") && (
          <button onClick={() => onSwitch({ run, head: { layer, head }, mode: mode === "plain" ? mitigation : "plain" })}>
            {mode === "plain" ? "Switch this head" : "Switch back"}
          </button>
        )}
      </span>
      {acts && !incident.acknowledged && <Acknowledge run={run} incident={incident.id} />}
    </>
  );
}

/** Focuses the field that replaced the button. One function for all renders, so that it runs once. */
const focused = (field: HTMLInputElement | null) => field?.focus();

/** Tells other users that somebody is working on the incident. */
function Acknowledge({ run, incident }: { run: string; incident: string }) {
  const [open, setOpen] = useState(false);
  const [who, setWho, keep] = useWho();
  const [reason, setReason] = useState("");
  const [error, setError] = useState<Error | null>(null);
  if (!open) return <button onClick={() => setOpen(true)}>Acknowledge</button>;
  const send = async (event: Event) => {
    event.preventDefault();
    keep();
    try {
      await api.acknowledge(run, { who, reason: reason || "acknowledged on the page", incident });
      setOpen(false);
    } catch (failed) {
      setError(failed as Error);
    }
  };
  return (
    <form class="care" onSubmit={send}>
      <input
        ref={focused}
        aria-label="your name"
        placeholder="Your name"
        required
        maxLength={128}
        value={who}
        onInput={(event) => setWho(event.currentTarget.value)}
      />
      <input
        aria-label="note"
        placeholder="Note for the others"
        maxLength={500}
        value={reason}
        onInput={(event) => setReason(event.currentTarget.value)}
      />
      <button type="submit">Acknowledge</button>
      {error && <ErrorNote error={error} />}
    </form>
  );
}

/** Number of heads with a warning; warnings about the whole run do not count. */
function counted({ heads }: Incident): string {
  const standing = heads.filter(({ state }) => state !== "quiet");
  const named = standing.filter(({ layer }) => layer !== null).length;
  const whole = named < standing.length ? "the whole run and " : "";
  return `${whole}${named} ${named === 1 ? "head" : "heads"}`;
}

function where({ layer, head }: IncidentHead): string {
  return layer === null ? "whole run" : `layer ${layer}${head === null ? "" : ` head ${head}`}`;
}

function modeOf(view: Loaded, { layer, head }: IncidentHead): string {
  const state = view.detail.layers.find((candidate) => candidate.layer === layer);
  return (head !== null && state?.modes[state.heads.indexOf(head)]) || "plain";
}

/** Steps left at the last warning or update of the head: estimate and lower bound. */
function forecast({ harm_step: harm, harm_first_step: low, harm_in_sight: ahead, step }: IncidentHead): string {
  if (harm === null) return ahead === false ? "stays below 512 on this course" : "no forecast";
  if (harm <= step) return PAST;
  const from = (at: number) => steps(roundTo2(Math.max(0, at - step)));
  if (low === null) return `about ${from(harm)}`;
  return `about ${from(harm)} (not before ${from(low)})`;
}
