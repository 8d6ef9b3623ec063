/** The charts of one or several runs: selects metrics, heads and markers. */

import { useMemo, useState } from "preact/hooks";
import type { CurveLine, MetricInfo } from "./service";
import { Chart, type Line, type Marker } from "./chart";
import type { Ink } from "./colour";
import { NOT_RECORDED, number, percent, shorten } from "./format";
import { withGaps } from "./gaps";
import type { Head } from "./head";
import type { Range } from "./place";
import { useResource, useSeen } from "./resource";
import { LiveSeries } from "./series";
import type { Loaded } from "./loaded";

const OTHER_LAYERS = 4;

interface Props {
  views: readonly Loaded[];
  catalog: readonly MetricInfo[];
  head: Head | null;
  range: Range;
  onRange: (range: Range) => void;
  ink: Ink;
}

/** `metric`: the metric in the address. */
export function Charts({ views, catalog, head, metric, range, onRange, ink }: Props & { metric: string | null }) {
  const [asked] = useState(metric); // fixed when the page opens, so that charts do not change places
  const [more, setMore] = useState(false);
  const markers = useMemo(() => views.flatMap((view) => markersOf(view, views.length > 1, ink)), [views, ink]);
  // Chosen again when a warning is raised or cleared, not with every sample, so that lines do not come and go.
  const warned = views.flatMap(({ detail }) => detail.warnings.map(({ id }) => id)).join();
  const layers = views.map(({ detail }) => `${detail.run} ${detail.layers.length}`).join();
  const riskiest = useMemo(() => (views.length === 1 ? riskiestLayers(views[0]!) : []), [warned, layers]);
  const drawn = catalog.filter(({ chart }) => chart !== null);
  const first = [...drawn.filter(({ key }) => key === asked), ...drawn.filter(({ key, chart }) => key !== asked && chart === "first")];
  const rest = drawn.filter((metric) => !first.includes(metric));
  const chart = (metric: MetricInfo) => (
    <MetricChart
      key={metric.key}
      metric={metric}
      views={views}
      head={head}
      riskiest={riskiest}
      markers={markers}
      range={range}
      onRange={onRange}
      ink={ink}
    />
  );
  return (
    <section id="signals" aria-label="Signals">
      <header class="title">
        <h2>Signals</h2>
        <p class="muted">{subject(head, views.length)}</p>
        <p class="key muted">
          {range && <button onClick={() => onRange(null)}>Show all steps</button>}
          <span style={{ color: ink.warning }}>▲</span> warning <span style={{ color: ink.switched }}>◆</span> switch
        </p>
      </header>
      <div class="charts">{first.map(chart)}</div>
      <details class="more" onToggle={(event) => setMore(event.currentTarget.open)}>
        <summary>More measures</summary>
        {more && <div class="charts">{rest.map(chart)}</div>}
      </details>
    </section>
  );
}

interface MetricChartProps extends Omit<Props, "catalog"> {
  metric: MetricInfo;
  /** Layers whose worst head is drawn in addition to the chosen head. */
  riskiest: readonly number[];
  markers: readonly Marker[];
}

function MetricChart({ metric, views, head, riskiest, markers, range, onRange, ink }: MetricChartProps) {
  const [box, seen] = useSeen<HTMLElement>();
  const [scale, setScale] = useState(metric.scale);
  const curved = metric.scale === "linear" ? "symlog" : metric.scale;
  const runs = views.map((view) => view.detail.run);
  const single = views.length === 1;
  const key = JSON.stringify([metric.key, runs, metric.per_head && [head, single && riskiest], range]);
  const sources = useMemo(() => {
    const span = range ? { from_step: range[0], ...(range[1] === null ? {} : { to_step: range[1] }) } : {};
    const of = (run: string, ...where: number[]) => new LiveSeries(run, [metric.key, ...where].join(":"), span);
    if (!metric.per_head) return runs.map((run) => of(run));
    const chosen = head ? runs.map((run) => of(run, head.layer, head.head)) : [];
    return single ? [...chosen, ...riskiest.map((layer) => of(runs[0]!, layer))] : chosen;
  }, [key]);
  const series = useResource((fresh) => Promise.all(sources.map((source) => source.load(fresh))), key, {
    on: ({ kind, run }) =>
      run === null || (runs.includes(run) && (kind === "started" || (kind === "sample" && (range?.[1] ?? null) === null))),
    seen,
  });
  const lines = useMemo((): Line[] => {
    // While no line has points, all of them keep the legend's room, so that nothing below it moves.
    const found = (series.data ?? sources.map((source) => source.blank())).map((line, i) => ({ line, i }));
    const recorded = found.filter(({ line }) => line.steps.length > 0);
    const curves = recorded.length > 0 ? recorded : found;
    if (!single) return curves.map(({ line, i }) => toLine(line, runs[i]!, views[i]!.colour));
    if (!metric.per_head) return curves.map(({ line }) => toLine(line, metric.title, ink.lines[1]!));
    return curves.flatMap(({ line, i }) => {
      if (head && i === 0) return [toLine(line, `layer ${head.layer} head ${head.head}`, ink.lines[0]!, "first")];
      if (sameAsChosen(line, head)) return [];
      const place = riskiest.indexOf(line.layer ?? -1);
      return [toLine(line, `layer ${line.layer} worst head`, ink.lines[1 + (place % (ink.lines.length - 1))]!, "rest")];
    });
  }, [series.data, sources, ink, single]);
  return (
    <Chart
      figure={box}
      title={metric.title}
      help={`${metric.help} Bad: ${metric.bad}`}
      lines={lines}
      markers={markers}
      scale={scale}
      onScale={() => setScale(scale === "linear" ? curved : "linear")}
      missing={series.error?.message ?? (series.data ? NOT_RECORDED : "loading")}
      range={range}
      onRange={onRange}
      ink={ink}
      format={metric.percent ? percent : number}
    />
  );
}

function toLine(line: CurveLine, name: string, colour: string, emphasis?: Line["emphasis"]): Line {
  return { name, colour, emphasis, ...withGaps(line) };
}

function subject(head: Head | null, runs: number): string {
  const name = head ? `layer ${head.layer} head ${head.head}` : "the worst heads";
  return runs > 1 || !head ? `of ${name}, against the step` : `of ${name} and the worst heads, against the step`;
}

/** True if a layer's worst head is always the chosen head, which already has a line. */
function sameAsChosen(line: CurveLine, head: Head | null): boolean {
  return head !== null && line.layer === head.layer && (line.worst_head ?? []).every((worst) => worst === head.head);
}

function riskiestLayers({ detail }: Loaded): number[] {
  const risk = (layer: Loaded["detail"]["layers"][number]) => Math.max(0, ...layer.risk.map((value) => value ?? 0));
  return [...detail.layers]
    .sort((a, b) => risk(b) - risk(a) || a.layer - b.layer)
    .slice(0, OTHER_LAYERS)
    .map((layer) => layer.layer)
    .sort((a, b) => a - b);
}

/** Raised warnings and applied switches; in the colour of their run if several runs are shown. */
function markersOf({ detail, events, colour }: Loaded, compare: boolean, ink: Ink): Marker[] {
  return events.flatMap((event): Marker[] => {
    if (event.step === null) return [];
    const text = `step ${event.step.toLocaleString("en")}: ${compare ? `${shorten(detail.run, 40)}: ` : ""}${event.sentence}`;
    if (event.verdict?.state === "raised")
      return [{ step: event.step, kind: "warning", colour: compare ? colour : ink.warning, text }];
    if (event.switched?.outcome === "applied")
      return [{ step: event.step, kind: "switch", colour: compare ? colour : ink.switched, text }];
    return [];
  });
}
