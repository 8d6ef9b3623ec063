/** The page of one run, or of several side by side: numbers, warnings, charts, heat map, switches and history. */

import { useEffect, useMemo, useState } from "preact/hooks";
import { api, Problem } from "./api";
import type { May } from "./about";
import type { Catalog } from "./service";
import type { Loaded } from "./loaded";
import { Charts } from "./charts";
import type { Head } from "./head";
import { Heads } from "./heads";
import { Incidents } from "./incidents";
import { History } from "./history";
import { ink as inkOf } from "./colour";
import { shorten } from "./format";
import { useResource } from "./resource";
import { ErrorNote, Link } from "./parts";
import { address, type Place, placeOf } from "./place";
import { Summary } from "./summary";
import { Approvals, Commands, SwitchDialog, type SwitchTarget } from "./switch";

interface Props {
  runs: readonly string[];
  catalog: Catalog;
  dark: boolean;
  /** Permissions of the user. */
  may: May;
  go: (address: string) => void;
}

export function View({ runs, catalog, dark, may, go }: Props) {
  const ink = inkOf(dark);
  const key = runs.join(",");
  const ours = (run: string | null) => run === null || runs.includes(run);
  const of = <T,>(ask: (run: string) => Promise<T>) => Promise.all(runs.map((run) => (runs.length > 1 ? orMissing(ask(run)) : ask(run))));
  const details = useResource(() => of(api.run), key, { on: (wake) => ours(wake.run), pause: 1500 });
  const events = useResource(() => of(api.events), key, {
    on: (wake) => ours(wake.run) && wake.kind !== "sample",
  });
  const incidents = useResource(() => of(api.incidents), key, {
    on: (wake) => ours(wake.run),
    pause: 3000,
  });
  const commands = useResource(() => of(api.commands), key, {
    on: (wake) => ours(wake.run) && wake.kind !== "sample",
  });
  const [place, setPlace] = useState(() => placeOf(location.search));
  /** Updates the address, so that it can be bookmarked and shared, without a new entry in the browser's history. */
  const move = (part: Partial<Place>) => {
    const next = { ...place, ...part };
    history.replaceState(null, "", address(runs, next));
    setPlace(next);
  };
  useEffect(() => {
    const moved = () => setPlace(placeOf(location.search));
    addEventListener("popstate", moved);
    return () => removeEventListener("popstate", moved);
  }, []);
  const [target, setTarget] = useState<SwitchTarget | null>(null);
  const views = useMemo(
    () =>
      details.data?.flatMap((detail, i): Loaded[] =>
        detail
          ? [
              {
                detail,
                incidents: incidents.data?.[i] ?? [],
                events: events.data?.[i] ?? [],
                commands: commands.data?.[i] ?? [],
                colour: ink.lines[i % ink.lines.length]!,
              },
            ]
          : [],
      ) ?? [],
    [details.data, incidents.data, events.data, commands.data, ink],
  );
  const orders = (commands.data ?? [])
    .flatMap((found) => found ?? [])
    .sort((a, b) => b.created_unix_seconds - a.created_unix_seconds);
  const head = place.head ?? worstHead(views);

  const error = details.error ?? incidents.error ?? events.error ?? commands.error;
  const gone = error instanceof Problem && error.status === 404;
  if (error && (gone || !(details.data && incidents.data && events.data && commands.data))) {
    return (
      <>
        <ErrorNote error={error} />
        <Link to={address([])} go={go}>
          All runs
        </Link>
      </>
    );
  }
  if (!details.data || !incidents.data || !events.data || !commands.data) return <p class="empty">Loading.</p>;
  const missing = runs.filter((_, i) => details.data![i] === null);
  const onSwitch = may.act ? setTarget : null;
  return (
    <>
      <nav class="crumbs">
        <Link to={address([])} go={go}>
          Runs
        </Link>
        <span aria-hidden="true">/</span>
        <span>{runs.length > 1 ? `Comparing ${runs.length} runs` : runs[0]}</span>
      </nav>
      {missing.length > 0 && (
        <p class="note error" role="alert">
          Not found: run {missing.map((run) => shorten(run, 80)).join(", run ")}.
        </p>
      )}
      {views.length > 0 && (
        <>
          <Summary views={views} catalog={catalog} may={may} go={go} />
          <Incidents
            views={views}
            compare={views.length > 1}
            onShow={(shown) => {
              move({ head: shown });
              document.getElementById("signals")?.scrollIntoView({ behavior: "smooth" });
            }}
            onSwitch={onSwitch}
          />
          <Approvals commands={orders} views={views} onSwitch={onSwitch} />
          <Charts
            views={views}
            catalog={catalog.metrics}
            head={head}
            metric={place.metric}
            range={place.range}
            onRange={(range) => move({ range })}
            ink={ink}
          />
          <Heads
            views={views}
            catalog={catalog.metrics}
            head={head}
            onHead={(head) => move({ head })}
            metric={place.metric}
            onMetric={(metric) => move({ metric })}
            onSwitch={onSwitch}
            ink={ink}
          />
          <Commands commands={orders} views={views} onSwitch={onSwitch} head={head} />
          <History views={views} />
        </>
      )}
      {target && <SwitchDialog target={target} catalog={catalog} close={() => setTarget(null)} />}
    </>
  );
}

/** null if the run does not exist, so that the other runs are still shown. */
function orMissing<T>(answer: Promise<T>): Promise<T | null> {
  return answer.catch((error: unknown) => {
    if (error instanceof Problem && error.status === 404) return null;
    throw error;
  });
}

/** The head to show first: the one closest to harm, otherwise the one with the highest risk. */
function worstHead(views: readonly Loaded[]): Head | null {
  for (const { incidents } of views) {
    const heads = incidents.filter(({ state }) => state !== "closed").flatMap(({ heads }) => heads);
    const first = heads.find((item) => item.layer !== null && item.head !== null && item.state !== "quiet");
    if (first) return { layer: first.layer!, head: first.head! };
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
