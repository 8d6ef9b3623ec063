/** The history of events, and the audit trail. */

import { useState } from "preact/hooks";
import { api } from "./api";
import { clock, moment, steps } from "./format";
import { useResource } from "./resource";
import { ErrorNote, Name, Swatch } from "./parts";
import type { Loaded } from "./loaded";

export function History({ views }: { views: readonly Loaded[] }) {
  const [open, setOpen] = useState(false);
  const [updates, setUpdates] = useState(false);
  const all = views
    .flatMap(({ events, colour }) => events.map((event) => ({ event, colour })))
    .sort((a, b) => b.event.unix_seconds - a.event.unix_seconds || b.event.id - a.event.id);
  const told = new Set<string>();
  /** Newest first. Only the newest event of an order is shown; a rank's answer to it is part of that event. */
  const news = ({ event }: (typeof all)[number]) => {
    if (event.verdict?.state === "updated" || event.switched?.command) return false;
    if (!event.command) return true;
    const known = told.has(event.command.id);
    told.add(event.command.id);
    return !known;
  };
  const events = updates ? all : all.filter(news);
  return (
    <section aria-label="History">
      <header class="title">
        <h2>What happened</h2>
        <label class="inline">
          <input type="checkbox" checked={updates} onChange={(event) => setUpdates(event.currentTarget.checked)} />{" "}
          show every update of warnings and orders
        </label>
      </header>
      <ol class="card events" tabIndex={0} aria-label="events, the newest first">
        {events.map(({ event, colour }) => (
          <li key={`${event.run} ${event.id}`} class={`${event.kind} ${event.verdict?.state ?? ""}`}>
            <time title={moment(event.unix_seconds)}>{clock(event.unix_seconds)}</time>
            <span class="step">{event.step === null ? "" : `step ${steps(event.step)}`}</span>
            <span>
              {views.length > 1 && (
                <>
                  <Swatch colour={colour} />
                  <b>
                    <Name of={event.run} />
                  </b>{" "}
                </>
              )}
              {event.sentence}
            </span>
          </li>
        ))}
        {events.length === 0 && <li class="empty">Nothing has happened yet.</li>}
      </ol>
      <details class="more" onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary>Audit trail</summary>
        {open && <Audit runs={views.map((view) => view.detail.run)} />}
      </details>
    </section>
  );
}

function Audit({ runs }: { runs: readonly string[] }) {
  const audit = useResource(() => api.audit(runs), `audit ${runs.join()}`, { on: (wake) => wake.kind !== "sample" });
  if (audit.error) return <ErrorNote error={audit.error} />;
  if (!audit.data) return <p class="empty">Loading the audit trail.</p>;
  const rows = audit.data;
  return (
    <div class="card table" tabIndex={0} role="region" aria-label="Rows of the audit trail">
      <table>
        <thead>
          <tr>
            <th>When</th>
            <th>Who</th>
            <th>What</th>
            <th>Details</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.sequence}>
              <td class="nowrap">{moment(row.unix_seconds)}</td>
              <td>{row.actor}</td>
              <td class="nowrap">{row.action}</td>
              <td class="details">{detailText(row.details)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length === 0 && <p class="empty">Nothing has been recorded yet.</p>}
    </div>
  );
}

function detailText(details: Record<string, unknown>): string {
  const text = (value: unknown) => (typeof value === "string" ? value : JSON.stringify(value));
  return Object.entries(details)
    .map(([name, value]) => `${name}: ${text(value)}`)
    .join(", ");
}
