/** One quantity against step: lines, markers for warnings and switches, a legend that follows the cursor. */

import type { RefObject } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { type Ink } from "./colour";
import { ends, type Scale, ticks } from "./axis";
import { number, percent, shorten, steps, tick } from "./format";
import type { Range } from "./place";

export interface Line {
  name: string;
  colour: string;
  /** Draws the line thicker (first) or fainter (rest). */
  emphasis?: "first" | "rest" | undefined;
  steps: readonly number[];
  /** null if nothing was recorded: drawn as a gap, not as zero. */
  values: readonly (number | null)[];
  /** Smallest and largest values of the steps that a point summarises. */
  low: readonly (number | null)[];
  high: readonly (number | null)[];
}

export interface Marker {
  step: number;
  kind: "warning" | "switch";
  colour: string;
  /** Description of the event. */
  text: string;
}

interface Props {
  figure: RefObject<HTMLElement | null>;
  title: string;
  help: string;
  lines: readonly Line[];
  markers: readonly Marker[];
  scale: Scale;
  /** Switches between a linear and a logarithmic axis. */
  onScale: () => void;
  /** Shown in place of the chart if there is nothing to draw. */
  missing: string;
  range: Range;
  onRange: (range: Range) => void;
  ink: Ink;
  format?: (value: number | null | undefined) => string;
}

const HEIGHT = 196;
const MOST_TICKS = 6;
const LEGEND_LETTERS = 48;
const DISTRIBUTION: Record<Scale, 1 | 3 | 4> = { linear: 1, log: 3, symlog: 4 };
/** Markers of one kind and colour closer than this are drawn as one, with a count. */
const NEAR_PIXELS = 12;

export function Chart({
  figure,
  title,
  help,
  lines,
  markers,
  scale,
  onScale,
  missing,
  range,
  onRange,
  ink,
  format = number,
}: Props) {
  const box = useRef<HTMLDivElement>(null);
  const legend = useRef<HTMLUListElement>(null);
  const caption = useRef<HTMLSpanElement>(null);
  const plot = useRef<uPlot | null>(null);
  const now = useRef({ markers, lines, format, onRange, ink });
  now.current = { markers, lines, format, onRange, ink };

  const data = useMemo(() => align(drawn(lines), scale), [lines, scale]);
  const recorded = lines.some((line) => line.values.some((value) => value !== null));
  const shape = JSON.stringify([lines.map((line) => [line.name, line.colour]), scale, ink.axis, recorded]);

  useEffect(() => {
    if (!box.current || !recorded) return;
    const readLegend = (u: uPlot) => writeLegend(legend.current, caption.current, u, now.current);
    const u = new uPlot(options(now, scale, box.current.clientWidth, readLegend), data, box.current);
    plot.current = u;
    const resize = new ResizeObserver(() => {
      if (box.current) u.setSize({ width: box.current.clientWidth, height: HEIGHT });
    });
    resize.observe(box.current);
    return () => {
      resize.disconnect();
      u.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    const u = plot.current;
    if (!u) return;
    u.setData(data, false);
    const first = data[0][0] ?? 0;
    const last = data[0][data[0].length - 1] ?? 1;
    const min = range?.[0] ?? first;
    u.setScale("x", { min, max: Math.max(range?.[1] ?? last, min + 1) });
    writeLegend(legend.current, caption.current, u, now.current);
  }, [data, range, shape]);

  useEffect(() => plot.current?.redraw(false), [markers]);

  return (
    <figure class="card chart" ref={figure}>
      <figcaption>
        <h3 title={help}>{title}</h3>
        <span class="at" ref={caption} />
        <button class="quiet" aria-pressed={scale !== "linear"} title="logarithmic axis" onClick={onScale}>
          log
        </button>
      </figcaption>
      {recorded ? (
        <div
          class="plot"
          ref={box}
          role="img"
          tabIndex={0}
          aria-label={`${describe(title, lines, format)} Arrow keys move the cursor, Escape shows all steps.`}
          onKeyDown={(event) => plot.current && key(event, plot.current, onRange)}
        />
      ) : (
        <p class="empty plot">{missing}</p>
      )}
      {/* made again when the chart goes or comes, so that no value of other steps stays */}
      <ul key={recorded} class="legend" ref={legend}>
        {lines.map((line) => (
          <li key={line.name}>
            <i style={{ background: line.colour }} />
            <span class="name" title={line.name}>
              {shorten(line.name, LEGEND_LETTERS)}
            </span>
            <output />
          </li>
        ))}
      </ul>
    </figure>
  );
}

/** Draws the first line of the legend last, so that it is on top. */
function drawn(lines: readonly Line[]): Line[] {
  return [...lines].reverse();
}

/** Merges lines with different steps into one table. undefined (the line does not have the step) is bridged; null is a gap. */
function align(lines: readonly Line[], scale: Scale): uPlot.AlignedData {
  const usable = (value: number | null) =>
    value === null || !Number.isFinite(value) || (scale === "log" && value <= 0) ? null : value;
  const tables = lines.map(({ steps, low, high, values }): uPlot.AlignedData => [
    [...steps],
    low.map(usable),
    high.map(usable),
    values.map(usable),
  ]);
  return tables.length ? uPlot.join(tables) : [[]];
}

type Now = {
  readonly current: {
    markers: readonly Marker[];
    lines: readonly Line[];
    onRange: (r: Range) => void;
    ink: Ink;
    format: (value: number | null | undefined) => string;
  };
};

function options(now: Now, scale: Scale, width: number, onCursor: (u: uPlot) => void): uPlot.Options {
  const { ink } = now.current;
  const lines = drawn(now.current.lines);
  const font = "12px Inter, system-ui, sans-serif";
  const axis = { stroke: ink.axis, font, grid: { stroke: ink.grid, width: 1 }, ticks: { show: false } };
  return {
    width,
    height: HEIGHT,
    padding: [14, 22, 0, 0], // the last tick's label is centred on the edge
    legend: { show: false },
    scales: {
      x: { time: false },
      y: { distr: DISTRIBUTION[scale], asinh: 1, range: (_u, min, max) => ends(scale, min, max) },
    },
    axes: [
      { ...axis, size: 28, gap: 6, space: 72, values: (_u, at) => at.map((value) => tick(value)) },
      {
        ...axis,
        size: 52,
        gap: 8,
        space: 36,
        ...(scale === "linear" ? {} : { splits: (_u: uPlot, _i: number, from: number, to: number) => ticks(scale, from, to, MOST_TICKS) }),
        filter: (_u, at) => at,
        grid: { ...axis.grid, filter: (_u, at) => at },
        values: (_u, at) =>
          at.map((value) => (value === null ? null : now.current.format === percent ? percent(value) : tick(value))),
      },
    ],
    series: [
      {},
      ...lines.flatMap(({ name, colour, emphasis }) => [
        { points: { show: false } },
        { points: { show: false } },
        {
          label: name,
          stroke: colour,
          width: emphasis === "first" ? 2.25 : 1.75,
          alpha: emphasis === "rest" ? 0.75 : 1,
          points: { show: false },
        },
      ]),
    ],
    bands: lines.map(({ colour }, i) => ({ series: [3 * i + 2, 3 * i + 1], fill: `${colour}2e` })),
    cursor: {
      sync: { key: "steps" },
      y: false,
      drag: { x: true, y: false, setScale: false },
      points: { size: (_u, i) => (i % 3 === 0 ? 7 : 0), fill: ink.surface, width: 2 },
    },
    hooks: {
      setCursor: [onCursor],
      setSelect: [
        (u) => {
          if (u.select.width < 4) return;
          const from = u.posToVal(u.select.left, "x");
          const to = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          now.current.onRange([Math.max(0, Math.floor(from)), Math.ceil(to)]);
        },
      ],
      ready: [(u) => u.over.addEventListener("dblclick", () => now.current.onRange(null))],
      draw: [(u) => drawMarkers(u, now.current.markers)],
    },
  };
}

/** Groups markers that are close together: [x in canvas pixels, markers], from left to right. */
function clusters(u: uPlot, markers: readonly Marker[]): [number, Marker[]][] {
  const found: [number, Marker[]][] = [];
  const alike = Map.groupBy(markers, ({ kind, colour }) => `${kind} ${colour}`);
  for (const same of alike.values()) {
    let last: [number, Marker[]] | null = null;
    for (const marker of same.toSorted((a, b) => a.step - b.step)) {
      const x = u.valToPos(marker.step, "x", true);
      if (last && x - last[0] < NEAR_PIXELS * devicePixelRatio) last[1].push(marker);
      else found.push((last = [x, [marker]]));
    }
  }
  return found.sort(([a], [b]) => a - b);
}

/** Draws warnings as dashed lines with a triangle, switches as solid lines with a diamond; groups show a count. */
function drawMarkers(u: uPlot, markers: readonly Marker[]): void {
  const { ctx, bbox } = u;
  const px = devicePixelRatio;
  const size = 5 * px;
  const places = new Map<number, [beside: number, taken: number]>();
  ctx.save();
  ctx.font = `600 ${10 * px}px Inter, system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  for (const [at, same] of clusters(u, markers)) {
    const line = Math.round(at) + 0.5;
    if (line < bbox.left - 1 || line > bbox.left + bbox.width + 1) continue;
    const { kind, colour } = same[0]!;
    // With several markers at one step, the second is drawn next to the first; to its left at the end of the chart.
    const [beside, taken] = places.get(line) ?? [0, 0];
    const count = same.length > 1 ? String(same.length) : "";
    const side = line + 60 * px > bbox.left + bbox.width ? -1 : 1;
    places.set(line, [beside + 1, taken + 2.4 * size + (count ? ctx.measureText(count).width + size : 0)]);
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = 1.25 * px;
    ctx.setLineDash(kind === "warning" ? [4 * px, 4 * px] : []);
    ctx.lineDashOffset = 4 * px * beside;
    ctx.beginPath();
    ctx.moveTo(line, bbox.top);
    ctx.lineTo(line, bbox.top + bbox.height);
    ctx.stroke();
    const x = line + side * taken;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top - 2 * size);
    if (kind === "warning") {
      ctx.lineTo(x + size, bbox.top);
      ctx.lineTo(x - size, bbox.top);
    } else {
      ctx.lineTo(x + size, bbox.top - size);
      ctx.lineTo(x, bbox.top);
      ctx.lineTo(x - size, bbox.top - size);
    }
    ctx.fill();
    if (count) {
      ctx.textAlign = side < 0 ? "right" : "left";
      ctx.fillText(count, x + side * 1.6 * size, bbox.top - size);
    }
  }
  ctx.restore();
}

/** Describes the markers at the cursor: the text of a single marker, or the number of markers. */
function told(markers: readonly Marker[]): string {
  if (markers.length < 2) return markers[0]?.text ?? "";
  const counts = Map.groupBy(markers, ({ kind }) => kind);
  const parts = [...counts].map(([kind, { length }]) => (length > 1 ? `${length} ${kind === "switch" ? "switches" : "warnings"}` : `1 ${kind}`));
  const [first, last] = [Math.min(...markers.map(({ step }) => step)), Math.max(...markers.map(({ step }) => step))];
  return `${first === last ? "step" : "steps"} ${steps(first)}${first === last ? "" : ` to ${steps(last)}`}: ${parts.join(", ")}`;
}

/** Writes the values at the cursor (the newest without a cursor) and describes the markers there. */
function writeLegend(list: HTMLElement | null, at: HTMLElement | null, u: uPlot, now: Now["current"]): void {
  if (!list || !at) return;
  const index = u.cursor.idx ?? null;
  const step = index === null ? null : (u.data[0][index] ?? null);
  const beside = (marker: Marker) => Math.abs(u.valToPos(marker.step, "x") - u.valToPos(step!, "x")) < 5;
  at.textContent = step === null ? "" : told(now.markers.filter(beside)) || `step ${steps(step)}`;
  list.querySelectorAll("output").forEach((output, i) => {
    const line = now.lines[i];
    if (line) output.textContent = now.format(valueAt(line, step));
  });
}

/** A line's value at a step (the last one at or before it), or its newest value. */
function valueAt(line: Line, step: number | null): number | null {
  let low = 0;
  let high = line.steps.length;
  if (step === null) low = high;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.steps[middle]! <= step!) low = middle + 1;
    else high = middle;
  }
  return line.values[low - 1] ?? null;
}

function describe(title: string, lines: readonly Line[], format: (value: number | null | undefined) => string): string {
  const last = lines.map((line) => `${line.name} ${format(valueAt(line, null))}`);
  return `${title} against step. Newest values: ${last.join(", ")}.`;
}

function key(event: KeyboardEvent, u: uPlot, onRange: (range: Range) => void): void {
  const length = u.data[0].length;
  const moves: Record<string, number> = {
    ArrowLeft: -1,
    ArrowRight: 1,
    PageUp: -20,
    PageDown: 20,
    Home: -length,
    End: length,
  };
  const move = moves[event.key];
  if (event.key === "Escape") onRange(null);
  if (move === undefined) return;
  event.preventDefault();
  const from = u.cursor.idx ?? length - 1;
  const step = u.data[0][Math.min(length - 1, Math.max(0, from + move))];
  if (step !== undefined) u.setCursor({ left: u.valToPos(step, "x"), top: 0 });
}
