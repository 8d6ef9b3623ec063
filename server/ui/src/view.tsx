/** One run, or several side by side: numbers, warnings, charts against step, the heat map, the hand on the switch, history. */

import { useMemo, useState } from "preact/hooks";
import { api, type Catalog, type RunDetail, type RunEvent } from "./api";
import { Charts } from "./charts";
import type { Head } from "./heatmap";
import { Heads } from "./heads";
import { History } from "./history";
import { ink as inkOf } from "./colour";
import { useResource } from "./resource";
import { address, ErrorNote, Link } from "./parts";
import { Summary } from "./summary";
import { Approvals, Commands, SwitchDialog, type SwitchTarget } from "./switch";
import { Warnings } from "./warnings";

interface Props {
  runs: readonly string[];
  catalog: Catalog;
  dark: boolean;
  go: (address: string) => void;
}

export interface Loaded {
  detail: RunDetail;
  events: RunEvent[];
  colour: string;
}

export function View({ runs, catalog, dark, go }: Props) {
  const ink = inkOf(dark);
  const key = runs.join(",");
  const ours = (run: string | null) => run === null || runs.includes(run);
  const details = useResource(() => Promise.all(runs.map(api.run)), key, { on: (wake) => ours(wake.run), pause: 1500 });
  const events = useResource(() => Promise.all(runs.map(api.events)), key, {
    on: (wake) => ours(wake.run) && wake.kind !== "sample",
  });
  const commands = useResource(() => Promise.all(runs.map(api.commands)), key, {
    on: (wake) => ours(wake.run) && wake.kind !== "sample",
  });
  const [picked, setPicked] = useState<Head | null>(null);
  const [target, setTarget] = useState<SwitchTarget | null>(null);
  const views = useMemo(
    () =>
      details.data?.map((detail, i): Loaded => ({
        detail,
        events: events.data?.[i] ?? [],
        colour: ink.lines[i % ink.lines.length]!,
      })) ?? [],
    [details.data, events.data, ink],
  );
  const orders = (commands.data ?? []).flat().sort((a, b) => b.created_unix_seconds - a.created_unix_seconds);
  const head = picked ?? worstHead(views);

  const error = details.error ?? events.error ?? commands.error;
  if (error && !(details.data && events.data && commands.data)) return <ErrorNote error={error} />;
  if (!details.data || !events.data || !commands.data) return <p class="empty">Loading.</p>;
  return (
    <>
      <nav class="crumbs">
        <Link to={address([])} go={go}>
          Runs
        </Link>
        <span aria-hidden="true">/</span>
        <span>{runs.length > 1 ? `Comparing ${runs.length} runs` : runs[0]}</span>
      </nav>
      <Summary views={views} go={go} />
      <Warnings
        views={views}
        compare={runs.length > 1}
        onShow={(shown) => {
          setPicked(shown);
          document.getElementById("signals")?.scrollIntoView({ behavior: "smooth" });
        }}
        onSwitch={setTarget}
      />
      <Approvals commands={orders} views={views} onSwitch={setTarget} />
      <Charts views={views} catalog={catalog.metrics} head={head} ink={ink} />
      <Heads views={views} catalog={catalog.metrics} head={head} onHead={setPicked} onSwitch={setTarget} ink={ink} />
      <Commands commands={orders} views={views} onSwitch={setTarget} head={head} />
      <History views={views} />
      {target && <SwitchDialog target={target} catalog={catalog} close={() => setTarget(null)} />}
    </>
  );
}

/** The head that most deserves a look: the first one warned about, else the one with the highest risk. */
function worstHead(views: readonly Loaded[]): Head | null {
  for (const { detail } of views) {
    const warning = detail.warnings.find((item) => item.layer !== null && item.head !== null);
    if (warning) return { layer: warning.layer!, head: warning.head! };
  }
  for (const { events } of views) {
    const first = events.findLast((event) => event.verdict?.state === "raised" && event.verdict.head !== null);
    if (first) return { layer: first.verdict!.layer!, head: first.verdict!.head! };
  }
  let worst: Head | null = null;
  let highest = -1;
  for (const { detail } of views) {
    for (const layer of detail.layers) {
      layer.heads.forEach((head, i) => {
        const risk = layer.risk[i] ?? 0;
        if (risk > highest) [worst, highest] = [{ layer: layer.layer, head }, risk];
      });
    }
  }
  return worst;
}
