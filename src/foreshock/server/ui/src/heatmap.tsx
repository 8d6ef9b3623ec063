/** Heat map of layers and heads at one step, and of heads over time, with a slider. A canvas stays fast for 80 x 64 heads. */

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { paintCells, prepare, TOP, useWidth } from "./canvas";
import { type Ink, ramp } from "./colour";
import { number, steps as stepText } from "./format";
import type { Scale } from "./axis";
import type { Frames } from "./frames";
import type { Head } from "./head";
import { Raster } from "./raster";
import { painter, scaleOf } from "./scale";

interface Props {
  title: string;
  frames: Frames;
  /** Increases with every loaded frame. */
  version: number;
  signed: boolean;
  axis: Scale;
  chosen: Head | null;
  warned: readonly Head[];
  switched: readonly Head[];
  ink: Ink;
  format?: (value: number | null) => string;
  onChoose: (head: Head) => void;
}

const SCALES = { linear: "linear", log: "log", symlog: "symmetric-log" };
const LEFT = 30;
const RIGHT = 6;
const BOTTOM = 24;
const GRID = 560;
const ROWS_THROUGH_TIME = 24;

export function HeatMap({
  title,
  frames,
  version,
  signed,
  axis,
  chosen,
  warned,
  switched,
  ink,
  format = number,
  onChoose,
}: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [box, width] = useWidth();
  const [scrubbed, setScrubbed] = useState<number | null>(null); // null follows the newest step
  const [hovered, setHovered] = useState<Head | null>(null);
  const colours = useMemo(() => ramp(signed, ink), [signed, ink]);
  const scale = useMemo(() => scaleOf(frames, signed, axis), [frames, version, signed, axis]);
  const paint = useMemo(() => painter(scale, colours), [scale, colours]);
  const rowsThroughTime = useMemo(() => outstanding(frames, chosen), [frames, version, chosen]);
  const rows = frames.layers.length;
  const columns = frames.heads.length;
  const last = frames.steps.length - 1;
  const at = scrubbed === null ? last : nearest(frames.steps, scrubbed);
  const frame = frames.at(frames.steps[at] ?? 0);
  const cell = Math.max(4, Math.min(44, (Math.min(width, GRID) - LEFT - RIGHT) / columns));
  const cellHeight = Math.max(4, Math.min(cell, 36, 400 / rows));

  useLayoutEffect(() => {
    const ctx = prepare(canvas.current!, LEFT + columns * cell + RIGHT, rows * cellHeight + BOTTOM);
    const values = frame?.values;
    paintCells(ctx, columns, rows, (column, row) => paint(values?.[row * columns + column] ?? NaN), [
      LEFT,
      0,
      columns * cell,
      rows * cellHeight,
    ]);
    if (cell >= 10 && cellHeight >= 10) {
      ctx.fillStyle = ink.surface;
      for (let c = 1; c < columns; c++) ctx.fillRect(LEFT + c * cell - 1, 0, 2, rows * cellHeight);
      for (let r = 1; r < rows; r++) ctx.fillRect(LEFT, r * cellHeight - 1, columns * cell, 2);
    }
    ctx.fillStyle = ink.axis;
    ctx.textAlign = "right";
    for (let r = 0; r < rows; r += Math.ceil(14 / cellHeight))
      ctx.fillText(String(frames.layers[r]), LEFT - 8, (r + 0.5) * cellHeight);
    ctx.textAlign = "center";
    for (let c = 0; c < columns; c += Math.ceil(22 / cell))
      ctx.fillText(String(frames.heads[c]), LEFT + (c + 0.5) * cell, rows * cellHeight + BOTTOM / 2);
    const corner = ({ layer, head }: Head) =>
      [LEFT + frames.heads.indexOf(head) * cell, frames.layers.indexOf(layer) * cellHeight] as const;
    const outline = (head: Head, colour: string, inset: number) => {
      const [x, y] = corner(head);
      for (const [style, lineWidth] of [
        [ink.surface, 4],
        [colour, 2],
      ] as const) {
        ctx.strokeStyle = style;
        ctx.lineWidth = lineWidth;
        ctx.strokeRect(x + inset, y + inset, cell - 2 * inset, cellHeight - 2 * inset);
      }
    };
    const roomy = Math.min(cell, cellHeight) > 12; // small cells are outlined on the outside, so that their colour stays visible
    if (chosen) outline(chosen, ink.outline, roomy ? 1 : -3);
    for (const head of warned) outline(head, ink.warning, roomy ? 5 : -1);
    ctx.fillStyle = ink.switched;
    ctx.strokeStyle = ink.surface;
    for (const head of switched) {
      const [x, y] = corner(head);
      diamond(ctx, x + cell / 2, y + cellHeight / 2, Math.min(6, cell / 3, cellHeight / 3));
    }
  });

  const shown = hovered ?? chosen;
  const find = (event: MouseEvent): Head | null => {
    const place = canvas.current!.getBoundingClientRect();
    const head = frames.heads[Math.floor((event.clientX - place.left - LEFT) / cell)];
    const layer = frames.layers[Math.floor((event.clientY - place.top - TOP) / cellHeight)];
    return layer === undefined || head === undefined ? null : { layer, head };
  };
  const walk = (event: KeyboardEvent) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const row = clamp((chosen ? frames.layers.indexOf(chosen.layer) : 0) + move[0]!, rows);
    const column = clamp((chosen ? frames.heads.indexOf(chosen.head) : 0) + move[1]!, columns);
    onChoose({ layer: frames.layers[row]!, head: frames.heads[column]! });
  };
  const scrub = (index: number) => {
    setScrubbed(index >= last ? null : frames.steps[index]!);
    frames.want(frames.steps[index]!);
  };

  return (
    <div class="heatmap">
      <div class="maps">
        <div class="canvas grid" ref={box} style={{ flexBasis: `${Math.min(GRID, LEFT + columns * 44 + RIGHT)}px` }}>
          <canvas
            ref={canvas}
            role="img"
            tabIndex={0}
            aria-label={`${title} by layer (rows) and head (columns) at step ${stepText(frame?.step)}. Arrow keys choose a head.`}
            onMouseMove={(event) => setHovered(find(event))}
            onMouseLeave={() => setHovered(null)}
            onClick={(event) => {
              const head = find(event);
              if (head) onChoose(head);
            }}
            onKeyDown={walk}
          />
        </div>
        <Raster
          frames={frames}
          version={version}
          rows={rowsThroughTime}
          at={at}
          paint={paint}
          chosen={chosen}
          ink={ink}
          onPick={(head, index) => {
            onChoose(head);
            scrub(index);
          }}
        />
      </div>
      <label class="scrub">
        <span class="label">Step</span>
        <input
          type="range"
          min={0}
          max={Math.max(0, last)}
          value={at}
          aria-valuetext={`step ${stepText(frame?.step)}`}
          onInput={(event) => scrub(Number(event.currentTarget.value))}
        />
        <output>{stepText(frame?.step)}</output>
      </label>
      <div class="scale">
        <span>{format(scale.low)}</span>
        <Ramp colours={colours} />
        <span>{format(scale.high)}</span>
        <span class="muted">{SCALES[scale.kind]} scale, over the whole run</span>
        <output class="reading">
          {shown
            ? `layer ${shown.layer} head ${shown.head}: ${format(valueOf(frames, frame?.values, shown))}`
            : "Choose a head to see it in the charts."}
        </output>
      </div>
    </div>
  );
}

function Ramp({ colours }: { colours: Uint32Array }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const image = new ImageData(colours.length, 1);
    new Uint32Array(image.data.buffer).set(colours);
    canvas.current!.getContext("2d")!.putImageData(image, 0, 0);
  }, [colours]);
  return <canvas class="ramp" ref={canvas} width={256} height={1} aria-hidden="true" />;
}

function diamond(ctx: CanvasRenderingContext2D, x: number, y: number, r: number): void {
  ctx.lineWidth = 1.5;
  ctx.beginPath();
  ctx.moveTo(x, y - r);
  ctx.lineTo(x + r, y);
  ctx.lineTo(x, y + r);
  ctx.lineTo(x - r, y);
  ctx.closePath();
  ctx.fill();
  ctx.stroke();
}

/** Heads that get a row over time: all heads of a small model; otherwise those farthest from their layer, and the chosen head. */
function outstanding(frames: Frames, chosen: Head | null): Head[] {
  const width = frames.heads.length;
  const all = frames.layers.flatMap((layer, row) => {
    const peaks = frames.peaks.slice(row * width, (row + 1) * width);
    const median = peaks.toSorted()[width >> 1]!;
    return frames.heads.map((head, column) => ({ layer, head, size: peaks[column]! - median }));
  });
  if (all.length <= ROWS_THROUGH_TIME) return all;
  const isChosen = (head: Head) => head.layer === chosen?.layer && head.head === chosen.head;
  const picked = [...all]
    .sort((a, b) => Number(isChosen(b)) - Number(isChosen(a)) || b.size - a.size)
    .slice(0, ROWS_THROUGH_TIME);
  return picked.sort((a, b) => a.layer - b.layer || a.head - b.head);
}

function valueOf(frames: Frames, values: Float32Array | undefined, { layer, head }: Head): number | null {
  const row = frames.layers.indexOf(layer);
  const column = frames.heads.indexOf(head);
  if (row < 0 || column < 0) return null;
  const value = values?.[row * frames.heads.length + column] ?? NaN;
  return Number.isNaN(value) ? null : value;
}

function nearest(sorted: readonly number[], step: number): number {
  const index = sorted.findIndex((candidate) => candidate >= step);
  return index < 0 ? sorted.length - 1 : index;
}

function clamp(value: number, length: number): number {
  return Math.max(0, Math.min(length - 1, value));
}
