/** The list of runs: state, step, risk, time left, warnings; choose one to read it, several to compare them. */

import { useState } from "preact/hooks";
import { api, type RunSummary } from "./api";
import { ago, number, steps } from "./format";
import { useResource } from "./live";
import { ErrorNote, Link, Risk, State } from "./parts";

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
        <table>
          <thead>
            <tr>
              <th class="tick"><span class="hidden">Compare</span></th>
              <th>Run</th>
              <th>State</th>
              <th class="right">Step</th>
              <th class="right">Loss</th>
              <th>Risk</th>
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

function Row({ run, chosen, toggle, go }: { run: RunSummary; chosen: boolean; toggle: () => void; go: (to: string) => void }) {
  return (
    <tr class={run.active_warnings ? "warned" : ""}>
      <td class="tick">
        <input type="checkbox" aria-label={`compare ${run.run}`} checked={chosen} onChange={toggle} />
      </td>
      <td>
        <Link class="run" to={address([run.run])} go={go}>{run.run}</Link>
        <Labels labels={run.labels} />
      </td>
      <td><State status={run.status} /></td>
      <td class="right">{steps(run.last_step)}</td>
      <td class="right">{number(run.loss)}</td>
      <td><Risk value={run.worst_risk} /></td>
      <td class="right">{run.active_warnings || "none"}</td>
      <td class="right muted">{ago(run.last_seen_unix_seconds)}</td>
    </tr>
  );
}

export function Labels({ labels }: { labels: Record<string, string> }) {
  const entries = Object.entries(labels);
  if (!entries.length) return null;
  return (
    <ul class="labels">
      {entries.map(([name, value]) => <li key={name}><span>{name}</span> {value}</li>)}
    </ul>
  );
}

/** The page's address for a set of runs; it can be bookmarked and shared. */
export function address(runs: readonly string[]): string {
  return runs.length ? `?runs=${runs.map(encodeURIComponent).join(",")}` : "?";
}

