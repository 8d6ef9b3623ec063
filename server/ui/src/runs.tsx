/** The list of runs: state, step, risk, time left, warnings; choose one to read it, several to compare them. */

import { useState } from "preact/hooks";
import { api, type RunSummary } from "./api";
import { number, steps, timeLeft } from "./format";
import { useResource } from "./resource";
import { address, Ago, ErrorNote, Labels, Link, Risk, State } from "./parts";

export function Runs({ go }: { go: (address: string) => void }) {
  const runs = useResource(api.runs, "runs", { on: () => true });
  const [chosen, setChosen] = useState<readonly string[]>([]);
  const toggle = (run: string) =>
    setChosen(chosen.includes(run) ? chosen.filter((other) => other !== run) : [...chosen, run]);

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
            {runs.data.map((run) => (
              <Row key={run.run} run={run} chosen={chosen.includes(run.run)} toggle={() => toggle(run.run)} go={go} />
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Row({
  run,
  chosen,
  toggle,
  go,
}: {
  run: RunSummary;
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
          {run.run}
        </Link>
        <Labels labels={run.labels} />
      </td>
      <td data-label="State">
        <State status={run.status} />
      </td>
      <td data-label="Step" class="right">
        {steps(run.last_step)}
      </td>
      <td data-label="Loss" class="right">
        {number(run.loss)}
      </td>
      <td data-label="Risk">
        <Risk value={run.worst_risk} />
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
