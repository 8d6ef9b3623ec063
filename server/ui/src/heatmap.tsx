/** Layer by head at one step, with a scrubber through time. Drawn to a canvas, so that 80 x 64 heads scrub fluidly. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type Ink, ramp } from "./colour";
import { number, steps as stepText } from "./format";
import type { Frames } from "./frames";

export interface Head {
  layer: number;
  head: number;
}

interface Props {
  title: string;
  frames: Frames;
  /** Grows with every frame that is loaded. */
  version: number;
  signed: boolean;
  chosen: Head | null;
  warned: readonly Head[];
  switched: readonly Head[];
  ink: Ink;
  format?: (value: number | null) => string;
  onChoose: (head: Head) => void;
}

const LEFT = 34;
const BOTTOM = 24;

export function HeatMap({ title, frames, version, signed, chosen, warned, switched, ink, format = number, onChoose }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [scrubbed, setScrubbed] = useState<number | null>(null); // null follows the newest step
  const [hovered, setHovered] = useState<Head | null>(null);
  const [width, setWidth] = useState(600);
  const last = frames.steps.length - 1;
  const at = scrubbed === null ? last : nearest(frames.steps, scrubbed);
  const frame = frames.at(frames.steps[at] ?? 0);
  const colours = useMemo(() => ramp(signed, ink), [signed, ink]);
  const scale = useMemo(() => scaleOf(frames, signed), [frames, version, signed]);
  const rows = frames.layers.length;
  const columns = frames.heads.length;
  const cell = Math.max(2, Math.min(44, (width - LEFT) / Math.max(1, columns)));
  const cellHeight = Math.max(4, Math.min(cell, 34, 420 / Math.max(1, rows)));

  useEffect(() => {
    const element = canvas.current!.parentElement!;
    const resize = new ResizeObserver(() => setWidth(element.clientWidth));
    resize.observe(element);
    setWidth(element.clientWidth);
    return () => resize.disconnect();
  }, []);

  useEffect(() => {
    draw(canvas.current!, frames, frame?.values ?? null, { cell, cellHeight, colours, scale, ink, chosen, warned, switched });
  });

  const shown = hovered ?? chosen;
  const value = shown ? valueOf(frames, frame?.values ?? null, shown) : null;
  const find = (event: MouseEvent): Head | null => {
    const box = canvas.current!.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LEFT) / cell);
    const row = Math.floor((event.clientY - box.top) / cellHeight);
    const layer = frames.layers[row];
    const head = frames.heads[column];
    return layer === undefined || head === undefined || column < 0 ? null : { layer, head };
  };
  const walk = (event: KeyboardEvent) => {
    const moves: Record<string, readonly [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const row = clamp(frames.layers.indexOf(chosen?.layer ?? frames.layers[0]!) + move[0], rows);
    const column = clamp(frames.heads.indexOf(chosen?.head ?? frames.heads[0]!) + move[1], columns);
    onChoose({ layer: frames.layers[row]!, head: frames.heads[column]! });
  };

  return (
    <div class="heatmap">
      <div class="canvas">
        <canvas
          ref={canvas}
          role="img"
          tabIndex={0}
          aria-label={`${title} by layer and head at step ${stepText(frame?.step)}. Arrow keys choose a head.`}
          onMouseMove={(event) => setHovered(find(event))}
          onMouseLeave={() => setHovered(null)}
          onClick={(event) => {
            const head = find(event);
            if (head) onChoose(head);
          }}
          onKeyDown={walk}
        />
      </div>
      <div class="scale">
        <span>{format(scale.low)}</span>
        <Ramp colours={colours} />
        <span>{format(scale.high)}</span>
        <span class="muted">{scale.logarithmic ? "log" : "linear"}, over the whole run</span>
        <output class="reading">
          {shown ? `layer ${shown.layer} head ${shown.head}: ${format(value)}` : "choose a head to plot it"}
        </output>
      </div>
      <label class="scrub">
        <span class="label">Step</span>
        <input
          type="range"
          min={0}
          max={Math.max(0, last)}
          value={at}
          aria-valuetext={`step ${stepText(frames.steps[at])}`}
          onInput={(event) => {
            const index = Number(event.currentTarget.value);
            setScrubbed(index >= last ? null : frames.steps[index]!);
            frames.want(frames.steps[index]!);
          }}
        />
        <output>{stepText(frame?.step)}</output>
      </label>
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

interface Scale {
  low: number;
  high: number;
  logarithmic: boolean;
}

/** One scale for the whole run, so that a colour means the same at every step. */
function scaleOf({ low, high }: Frames, signed: boolean): Scale {
  if (low > high) return { low: 0, high: 1, logarithmic: false };
  if (signed) {
    const reach = Math.max(-low, high) || 1;
    return { low: -reach, high: reach, logarithmic: false };
  }
  return { low, high: high > low ? high : low + 1, logarithmic: low > 0 && high / low > 50 };
}

interface Drawing {
  cell: number;
  cellHeight: number;
  colours: Uint32Array;
  scale: Scale;
  ink: Ink;
  chosen: Head | null;
  warned: readonly Head[];
  switched: readonly Head[];
}

function draw(canvas: HTMLCanvasElement, frames: Frames, values: Float32Array | null, drawing: Drawing): void {
  const { cell, cellHeight, colours, scale, ink } = drawing;
  const rows = frames.layers.length;
  const columns = frames.heads.length;
  const image = new ImageData(Math.max(1, columns), Math.max(1, rows));
  const pixels = new Uint32Array(image.data.buffer);
  const [low, high] = scale.logarithmic ? [Math.log(scale.low), Math.log(scale.high)] : [scale.low, scale.high];
  for (let i = 0; i < rows * columns; i++) {
    const value = values?.[i] ?? NaN;
    if (Number.isNaN(value)) continue; // not recorded: left empty
    const position = ((scale.logarithmic ? Math.log(value) : value) - low) / (high - low);
    pixels[i] = colours[Math.max(0, Math.min(255, Math.round(position * 255)))]!;
  }
  const small = new OffscreenCanvas(image.width, image.height);
  small.getContext("2d")!.putImageData(image, 0, 0);

  const width = LEFT + columns * cell;
  const height = rows * cellHeight + BOTTOM;
  const ratio = devicePixelRatio;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d")!;
  ctx.scale(ratio, ratio);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(small, LEFT, 0, columns * cell, rows * cellHeight);
  if (cell >= 10 && cellHeight >= 10) {
    ctx.fillStyle = ink.surface;
    for (let c = 1; c < columns; c++) ctx.fillRect(LEFT + c * cell - 1, 0, 2, rows * cellHeight);
    for (let r = 1; r < rows; r++) ctx.fillRect(LEFT, r * cellHeight - 1, columns * cell, 2);
  }
  ctx.fillStyle = ink.axis;
  ctx.font = "11px Inter, system-ui, sans-serif";
  ctx.textBaseline = "middle";
  ctx.textAlign = "right";
  const rowStride = Math.ceil(14 / cellHeight);
  for (let r = 0; r < rows; r += rowStride) ctx.fillText(String(frames.layers[r]), LEFT - 8, (r + 0.5) * cellHeight);
  ctx.textAlign = "center";
  const columnStride = Math.ceil(22 / cell);
  for (let c = 0; c < columns; c += columnStride) {
    ctx.fillText(String(frames.heads[c]), LEFT + (c + 0.5) * cell, rows * cellHeight + BOTTOM / 2);
  }
  const corner = (head: Head) => [LEFT + frames.heads.indexOf(head.head) * cell, frames.layers.indexOf(head.layer) * cellHeight] as const;
  const frame = (head: Head, colour: string, inset: number) => {
    const [x, y] = corner(head);
    ctx.strokeStyle = colour;
    ctx.lineWidth = 2;
    ctx.strokeRect(x + inset, y + inset, cell - 2 * inset, cellHeight - 2 * inset);
  };
  for (const head of drawing.warned) frame(head, ink.warning, 2);
  for (const head of drawing.switched) {
    const [x, y] = corner(head);
    ctx.fillStyle = ink.switched;
    ctx.strokeStyle = ink.surface;
    ctx.lineWidth = 1.5;
    const r = Math.min(6, cell / 3, cellHeight / 3);
    ctx.beginPath();
    ctx.moveTo(x + cell / 2, y + cellHeight / 2 - r);
    ctx.lineTo(x + cell / 2 + r, y + cellHeight / 2);
    ctx.lineTo(x + cell / 2, y + cellHeight / 2 + r);
    ctx.lineTo(x + cell / 2 - r, y + cellHeight / 2);
    ctx.closePath();
    ctx.fill();
    ctx.stroke();
  }
  if (drawing.chosen) frame(drawing.chosen, ink.outline, 1);
}

function valueOf(frames: Frames, values: Float32Array | null, { layer, head }: Head): number | null {
  const row = frames.layers.indexOf(layer);
  const column = frames.heads.indexOf(head);
  if (row < 0 || column < 0) return null;
  const value = values?.[row * frames.heads.length + column] ?? NaN;
  return Number.isNaN(value) ? null : value;
}

function nearest(sorted: readonly number[], step: number): number {
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle]! < step) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low);
}

function clamp(value: number, length: number): number {
  return Math.max(0, Math.min(length - 1, value));
}
