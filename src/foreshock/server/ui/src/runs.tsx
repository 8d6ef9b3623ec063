/** The list of runs, with search, filters and order. Users open one run or compare several. */

import { useMemo, useState } from "preact/hooks";
import { api } from "./api";
import type { Catalog, RunSummary } from "./service";
import { type Asked, addressOf, asked, found as matching, labelsOf, ORDERS, RISKS, STATES } from "./fleet";
import { Tags } from "./about";
import { address } from "./place";
import { useResource } from "./resource";
import { Ago, ErrorNote, Labels, Link, Name, Standing, State } from "./parts";

const SHOWN = 100;

export function Runs({ catalog, go }: { catalog: Catalog; go: (address: string) => void }) {
  const runs = useResource(api.runs, "runs", { on: () => true, soon: 1000 });
  const [chosen, setChosen] = useState<readonly string[]>([]);
  const [ask, setAsk] = useState(() => asked(location.search));
  const [shown, setShown] = useState(SHOWN);
  const toggle = (run: string) =>
    setChosen(chosen.includes(run) ? chosen.filter((other) => other !== run) : [...chosen, run]);
  /** Updates the address, so that it can be bookmarked and shared, without a new entry in the browser's history. */
  const change = (part: Partial<Asked>) => {
    const next = { ...ask, ...part };
    history.replaceState(null, "", addressOf(next));
    setAsk(next);
    setShown(SHOWN);
  };
  const found = useMemo(() => matching(runs.data ?? [], ask, catalog), [runs.data, ask, catalog]);
  const labels = useMemo(() => labelsOf(runs.data ?? []), [runs.data]);
  const warned = runs.data?.filter((run) => run.active_warnings > 0).length ?? 0;

  if (runs.error && !runs.data) return <ErrorNote error={runs.error} />;
  if (!runs.data) return <p class="empty">Loading the runs.</p>;
  if (runs.data.length === 0) {
    return (
      <section class="card empty first">
        <h1>No runs yet</h1>
        <p>
          Call <code>foreshock.attach(model, url="{location.origin}")</code> in your training script, or try <code>foreshock demo</code>.
          The run appears here with its first step.
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
          {runs.data.length > 1 ? " runs" : " run"}, {warned ? `${warned.toLocaleString("en")} with warnings` : "none with warnings"}
        </p>
        <button class="primary" disabled={chosen.length < 2} onClick={() => go(address(chosen))}>
          {chosen.length < 2 ? "Tick two or more to compare" : `Compare ${chosen.length} runs`}
        </button>
      </header>
      <search class="asked">
        <input
          type="search"
          placeholder="Search names, tags and labels"
          aria-label="search names, tags and labels"
          value={ask.search}
          onInput={(event) => change({ search: event.currentTarget.value })}
        />
        <Choice name="state" of={STATES} value={ask.state} choose={(state) => change({ state })} />
        <Choice name="risk" of={RISKS} value={ask.risk} choose={(risk) => change({ risk })} />
        {(labels.length > 0 || ask.label) && (
          <Choice
            name="label"
            of={Object.fromEntries(["", ...new Set([...labels, ask.label].filter(Boolean))].map((l) => [l, l || "Any tag or label"]))}
            value={ask.label}
            choose={(label) => change({ label })}
          />
        )}
        <Choice name="order" of={ORDERS} value={ask.sort} choose={(sort) => change({ sort })} />
        <p class="muted" role="status">
          {found.length === runs.data.length ? "" : `${found.length.toLocaleString("en")} of ${runs.data.length.toLocaleString("en")} match`}
        </p>
      </search>
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
              <th class="right">Last heard from</th>
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
        {found.length === 0 && <p class="empty">No matching runs.</p>}
      </div>
      {found.length > shown && (
        <button onClick={() => setShown(shown + SHOWN)}>Show {Math.min(SHOWN, found.length - shown)} more</button>
      )}
    </section>
  );
}

function Choice<T extends string>({
  name,
  of,
  value,
  choose,
}: {
  name: string;
  of: Record<T, string>;
  value: T;
  choose: (value: T) => void;
}) {
  return (
    <select aria-label={name} value={value} onChange={(event) => choose(event.currentTarget.value as T)}>
      {(Object.entries(of) as [T, string][]).map(([key, text]) => (
        <option key={key} value={key}>
          {text}
        </option>
      ))}
    </select>
  );
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
          <Name of={run.display_name ?? run.run} most={64} />
        </Link>
        {run.display_name && run.display_name !== run.run && (
          <span class="identity muted">
            <Name of={run.run} most={64} />
          </span>
        )}
        <Tags tags={run.tags} />
        <Labels labels={run.labels} />
      </td>
      <td data-label="State">
        <State run={run} />
      </td>
      <Standing run={run} catalog={catalog} />
      <td data-label="Last heard from" class="right muted">
        <Ago at={run.last_seen_unix_seconds} />
      </td>
    </tr>
  );
}
