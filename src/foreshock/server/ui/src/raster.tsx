/** Heads over time: one row per head, one column per step, with the colours of the heat map. */

import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { paintCells, prepare, TOP, useWidth } from "./canvas";
import type { Ink } from "./colour";
import { tick } from "./format";
import type { Frames } from "./frames";
import type { Head } from "./head";

interface Props {
  frames: Frames;
  /** Increases with every loaded frame. */
  version: number;
  rows: readonly Head[];
  /** Index of the step in the heat map. */
  at: number;
  paint: (value: number) => number;
  chosen: Head | null;
  ink: Ink;
  onPick: (head: Head, at: number) => void;
}

const LEFT = 46;
const BOTTOM = 24;

export function Raster({ frames, version, rows, at, paint, chosen, ink, onPick }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [box, width] = useWidth();
  const columns = frames.steps.length;
  const rowHeight = Math.max(7, Math.min(22, 340 / Math.max(1, rows.length)));
  const plotted = Math.max(1, width - LEFT);
  const found = useMemo(() => frames.steps.map((step) => frames.at(step)?.values), [frames, version]);

  useLayoutEffect(() => {
    const height = rows.length * rowHeight;
    const ctx = prepare(canvas.current!, width, height + BOTTOM);
    const places = rows.map(
      ({ layer, head }) => frames.layers.indexOf(layer) * frames.heads.length + frames.heads.indexOf(head),
    );
    paintCells(ctx, columns, rows.length, (column, row) => paint(found[column]?.[places[row]!] ?? NaN), [
      LEFT,
      0,
      plotted,
      height,
    ]);
    ctx.fillStyle = ink.surface;
    if (rowHeight >= 10)
      for (let row = 1; row < rows.length; row++) ctx.fillRect(LEFT, row * rowHeight - 0.5, plotted, 1);
    ctx.fillStyle = ink.axis;
    ctx.textAlign = "right";
    const stride = Math.ceil(13 / rowHeight);
    rows.forEach(({ layer, head }, row) => {
      const mine = layer === chosen?.layer && head === chosen.head;
      if (row % stride && !mine) return;
      ctx.fillStyle = mine ? ink.outline : ink.axis;
      ctx.fillText(`${layer}·${head}`, LEFT - 8, (row + 0.5) * rowHeight);
    });
    const labels = Math.max(1, Math.floor(plotted / 110));
    ctx.fillStyle = ink.axis;
    for (let i = 0; i <= labels; i++) {
      const column = Math.round((i / labels) * (columns - 1));
      ctx.textAlign = i === 0 ? "left" : i === labels ? "right" : "center";
      ctx.fillText(
        tick(frames.steps[column] ?? 0, 3),
        LEFT + ((column + (i === 0 ? 0 : i === labels ? 1 : 0.5)) / columns) * plotted,
        height + BOTTOM / 2,
      );
    }
    ctx.strokeStyle = ink.outline;
    ctx.lineWidth = 1.5;
    const x = LEFT + ((at + 0.5) / columns) * plotted;
    ctx.beginPath();
    ctx.moveTo(x, 0);
    ctx.lineTo(x, height);
    ctx.stroke();
  });

  const pick = (event: MouseEvent) => {
    const place = canvas.current!.getBoundingClientRect();
    const head = rows[Math.floor((event.clientY - place.top - TOP) / rowHeight)];
    const column = Math.floor(((event.clientX - place.left - LEFT) / plotted) * columns);
    if (head && column >= 0 && column < columns) onPick(head, column);
  };
  return (
    <div class="canvas" ref={box}>
      <canvas
        ref={canvas}
        role="img"
        aria-label="The same measure over the steps, one row for each head (layer·head)."
        onClick={pick}
      />
    </div>
  );
}
