/** Current state of the runs: tiles for one run, a table for several. */

import { number, steps, timeLeft } from "./format";
import { Ago, Labels, Link, Name, Risk, riskLevels, Standing, State, Swatch } from "./parts";
import { Care, Identity, type May, Notes, Tags } from "./about";
import { address } from "./place";
import type { Loaded } from "./loaded";
import type { Catalog } from "./service";

interface Props {
  views: readonly Loaded[];
  catalog: Catalog;
  may: May;
  go: (address: string) => void;
}

export function Summary({ views, ...given }: Props) {
  const [only, ...others] = views;
  return only && !others.length ? <Tiles view={only} {...given} /> : <Table views={views} {...given} />;
}

function Tiles({ view: { detail }, catalog, may, go }: Omit<Props, "views"> & { view: Loaded }) {
  const tiles: readonly [string, preact.ComponentChildren][] = [
    ["Step", steps(detail.last_step)],
    ["Loss", number(detail.loss)],
    ["Risk", <Risk value={detail.worst_risk} levels={riskLevels(catalog)} />],
    ["Steps left", timeLeft(detail)],
    ["Switched heads", switchedHeads(detail.layers)],
    ["Policy", `${detail.policy ?? "not recorded"}${detail.qk_clip ? `, QK-Clip ${detail.qk_clip === "never" ? "off" : detail.qk_clip}` : ""}`],
    ["Numerics", detail.numerics ?? "not recorded"],
    ["Last heard from", <Ago at={detail.last_seen_unix_seconds} />],
  ];
  return (
    <section class="summary">
      <header class="title">
        <Identity detail={detail} />
        <State run={detail} />
        <Care detail={detail} may={may} gone={() => go(address([]))} />
      </header>
      <Tags tags={detail.tags} />
      <Labels labels={detail.labels} />
      <Notes notes={detail.notes} />
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

function Table({ views, catalog, go }: Omit<Props, "may">) {
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
                    <Name of={detail.run} />
                  </Link>
                </td>
                <td data-label="State">
                  <State run={detail} />
                </td>
                <td data-label="Numerics">{detail.numerics ?? "not recorded"}</td>
                <td data-label="Policy">{detail.policy ?? "not recorded"}</td>
                <Standing run={detail} catalog={catalog} />
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
  const names = [...new Set(switched)].join(", ");
  return `${switched.length} of ${known.length} (${names})`;
}
