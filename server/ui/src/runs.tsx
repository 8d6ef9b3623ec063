/** The list of runs: state, step, risk, time left, warnings; choose one to read it, several to compare them. */

import { useState } from "preact/hooks";
import { api } from "./api";
import type { Catalog, RunSummary } from "./service";
import { number, steps, timeLeft } from "./format";
import { useResource } from "./resource";
import { address, Ago, ErrorNote, Labels, Link, Name, Risk, riskLevels, State } from "./parts";

const SHOWN = 100;

export function Runs({ catalog, go }: { catalog: Catalog; go: (address: string) => void }) {
  const runs = useResource(api.runs, "runs", { on: () => true });
  const [chosen, setChosen] = useState<readonly string[]>([]);
  const [search, setSearch] = useState("");
  const [shown, setShown] = useState(SHOWN);
  const toggle = (run: string) =>
    setChosen(chosen.includes(run) ? chosen.filter((other) => other !== run) : [...chosen, run]);
  // The warned ones first, however long ago they were heard of; the sort is stable.
  const found = (runs.data ?? [])
    .filter((run) => matches(run, search))
    .sort((a, b) => Number(b.active_warnings > 0) - Number(a.active_warnings > 0));
  const warned = runs.data?.filter((run) => run.active_warnings > 0).length ?? 0;

  if (runs.error && !runs.data) return <ErrorNote error={runs.error} />;
  if (!runs.data) return <p class="empty">Loading the runs.</p>;
  if (runs.data.length === 0) {
    return (
      <section class="card empty first">
        <h1>No run has sent anything yet</h1>
        <p>
          Call <code>foreshock.monitor.attach(model)</code> in your training script, or try <code>foreshock demo</code>.
          It appears here with its first step.
        </p>
      </section>
    );
  }
  return (
    <section>
      <header class="title">
        <h1>Runs</h1>
        <p class="muted">
          {runs.data.length.toLocaleString("en")}
          {runs.data.length > 1 ? " runs" : " run"}, {warned ? `${warned.toLocaleString("en")} with warnings` : "no warning"}
        </p>
        <input
          type="search"
          placeholder="Search names and labels"
          aria-label="search names and labels"
          value={search}
          onInput={(event) => setSearch(event.currentTarget.value)}
        />
        <button class="primary" disabled={chosen.length < 2} onClick={() => go(address(chosen))}>
          {chosen.length < 2 ? "Tick two or more to compare" : `Compare ${chosen.length} runs`}
        </button>
      </header>
      <div class="card table">
        <table class="folds">
          <thead>
            <tr>
              <th class="tick">
                <span class="hidden">Compare</span>
              </th>
              <th>Run</th>
              <th>State</th>
              <th class="right">Step</th>
              <th class="right">Loss</th>
              <th>Risk</th>
              <th class="right">Steps left</th>
              <th class="right">Warnings</th>
              <th class="right">Last heard</th>
            </tr>
          </thead>
          <tbody>
            {found.slice(0, shown).map((run) => (
              <Row
                key={run.run}
                run={run}
                catalog={catalog}
                chosen={chosen.includes(run.run)}
                toggle={() => toggle(run.run)}
                go={go}
              />
            ))}
          </tbody>
        </table>
        {found.length === 0 && <p class="empty">No run matches.</p>}
      </div>
      {found.length > shown && (
        <button onClick={() => setShown(shown + SHOWN)}>Show {Math.min(SHOWN, found.length - shown)} more</button>
      )}
    </section>
  );
}

function matches(run: RunSummary, search: string): boolean {
  const texts = [run.run, ...Object.entries(run.labels).map(([name, value]) => `${name} ${value}`)];
  return texts.some((text) => text.toLowerCase().includes(search.trim().toLowerCase()));
}

function Row({
  run,
  catalog,
  chosen,
  toggle,
  go,
}: {
  run: RunSummary;
  catalog: Catalog;
  chosen: boolean;
  toggle: () => void;
  go: (to: string) => void;
}) {
  return (
    <tr class={run.active_warnings ? "warned" : ""}>
      <td class="tick">
        <input type="checkbox" aria-label={`compare ${run.run}`} checked={chosen} onChange={toggle} />
      </td>
      <td class="name">
        <Link class="run" to={address([run.run])} go={go}>
          <Name of={run.run} most={64} />
        </Link>
        <Labels labels={run.labels} />
      </td>
      <td data-label="State">
        <State run={run} silent={catalog.silent_seconds} />
      </td>
      <td data-label="Step" class="right">
        {steps(run.last_step)}
      </td>
      <td data-label="Loss" class="right">
        {number(run.loss)}
      </td>
      <td data-label="Risk">
        <Risk value={run.worst_risk} levels={riskLevels(catalog)} />
      </td>
      <td data-label="Steps left" class={`right ${run.active_warnings ? "" : "muted"}`}>
        {timeLeft(run)}
      </td>
      <td data-label="Warnings" class="right">
        {run.active_warnings || "none"}
      </td>
      <td data-label="Last heard" class="right muted">
        <Ago at={run.last_seen_unix_seconds} />
      </td>
    </tr>
  );
}
