/** Drawing on canvases at the resolution of the screen. */

import { type RefObject } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

/** Margin at the top, for the upper half of a label and for outlines. */
export const TOP = 6;

/** Resizes and clears a canvas (CSS pixels, plus TOP) and sets its font. */
export function prepare(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = devicePixelRatio;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round((height + TOP) * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height + TOP}px`;
  const ctx = canvas.getContext("2d")!;
  ctx.scale(ratio, ratio);
  ctx.translate(0, TOP);
  ctx.imageSmoothingEnabled = false;
  ctx.font = "11px Inter, system-ui, sans-serif";
  ctx.textBaseline = "middle";
  return ctx;
}

/** Paints all cells as one scaled image, with a single draw call. */
export function paintCells(
  ctx: CanvasRenderingContext2D,
  columns: number,
  rows: number,
  colour: (column: number, row: number) => number,
  [x, y, width, height]: readonly [number, number, number, number],
): void {
  if (columns < 1 || rows < 1) return;
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) pixels[row * columns + column] = colour(column, row);
  }
  const small = new OffscreenCanvas(columns, rows);
  small.getContext("2d")!.putImageData(image, 0, 0);
  ctx.drawImage(small, x, y, width, height);
}

/** The width of an element, kept up to date. */
export function useWidth(): [box: RefObject<HTMLDivElement | null>, width: number] {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(320);
  useLayoutEffect(() => {
    const resize = new ResizeObserver(() => box.current && setWidth(box.current.clientWidth));
    resize.observe(box.current!);
    setWidth(box.current!.clientWidth);
    return () => resize.disconnect();
  }, []);
  return [box, width];
}
