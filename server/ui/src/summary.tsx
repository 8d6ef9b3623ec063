/** Where the runs stand now: tiles for one run, a table for several. */

import { number, steps, timeLeft, words } from "./format";
import { address, Ago, Labels, Link, Risk, State, Swatch } from "./parts";
import type { Loaded } from "./view";

interface Props {
  views: readonly Loaded[];
  go: (address: string) => void;
}

export function Summary({ views, go }: Props) {
  return views.length === 1 ? <Tiles view={views[0]!} /> : <Table views={views} go={go} />;
}

function Tiles({ view: { detail } }: { view: Loaded }) {
  const tiles: readonly [string, preact.ComponentChildren][] = [
    ["Step", steps(detail.last_step)],
    ["Loss", number(detail.loss)],
    ["Risk", <Risk value={detail.worst_risk} />],
    ["Steps left", timeLeft(detail)],
    ["Switched heads", switchedHeads(detail.layers)],
    ["Policy", detail.policy ?? "not recorded"],
    ["Numerics", detail.numerics ?? "not recorded"],
    ["Last heard", <Ago at={detail.last_seen_unix_seconds} />],
  ];
  return (
    <section class="summary">
      <header class="title">
        <h1>{detail.run}</h1>
        <State status={detail.status} />
      </header>
      <Labels labels={detail.labels} />
      <dl class="tiles card">
        {tiles.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

function Table({ views, go }: Props) {
  return (
    <section class="summary">
      <header class="title">
        <h1>Side by side</h1>
      </header>
      <div class="card table">
        <table class="folds">
          <thead>
            <tr>
              <th>Run</th>
              <th>State</th>
              <th>Numerics</th>
              <th>Policy</th>
              <th class="right">Step</th>
              <th class="right">Loss</th>
              <th>Risk</th>
              <th class="right">Steps left</th>
              <th class="right">Warnings</th>
              <th class="right">Switched heads</th>
            </tr>
          </thead>
          <tbody>
            {views.map(({ detail, colour }) => (
              <tr key={detail.run}>
                <td class="name">
                  <Swatch colour={colour} />
                  <Link class="run" to={address([detail.run])} go={go}>
                    {detail.run}
                  </Link>
                </td>
                <td data-label="State">
                  <State status={detail.status} />
                </td>
                <td data-label="Numerics">{detail.numerics ?? "not recorded"}</td>
                <td data-label="Policy">{detail.policy ?? "not recorded"}</td>
                <td data-label="Step" class="right">
                  {steps(detail.last_step)}
                </td>
                <td data-label="Loss" class="right">
                  {number(detail.loss)}
                </td>
                <td data-label="Risk">
                  <Risk value={detail.worst_risk} />
                </td>
                <td data-label="Steps left" class="right">
                  {timeLeft(detail)}
                </td>
                <td data-label="Warnings" class="right">
                  {detail.warnings.length || "none"}
                </td>
                <td data-label="Switched heads" class="right">
                  {switchedHeads(detail.layers)}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function switchedHeads(layers: Loaded["detail"]["layers"]): string {
  const modes = layers.flatMap((layer) => layer.modes);
  const known = modes.filter((mode) => mode !== null);
  if (!known.length) return "not recorded";
  const switched = known.filter((mode) => mode !== "plain");
  if (!switched.length) return "none";
  const names = [...new Set(switched)].map(words).join(", ");
  return `${switched.length} of ${known.length} (${names})`;
}
