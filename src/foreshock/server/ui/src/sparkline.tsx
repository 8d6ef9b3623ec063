/** A small chart of one quantity of one head, for use in a line of text. */

import { api } from "./api";
import { useResource } from "./resource";

const WIDTH = 96;
const HEIGHT = 22;

export function Sparkline({ run, line, label }: { run: string; line: string; label: string }) {
  const curve = useResource(() => api.curves(run, { line: [line], max_points: 48 }), `${run} ${line}`, {
    on: (wake) => wake.run === run && wake.kind !== "event",
    pause: 5000,
  });
  const drawn = points(curve.data?.[0]?.last ?? []);
  if (!drawn) return null;
  return (
    <svg class="sparkline" width={WIDTH} height={HEIGHT} viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={label}>
      <title>{label}</title>
      <polyline points={drawn} fill="none" stroke="currentColor" stroke-width="1.5" stroke-linejoin="round" />
    </svg>
  );
}

/** Scales the recorded values to the box, largest absolute value at the top; empty for fewer than two values. */
function points(values: readonly (number | null)[]): string {
  const known = values.flatMap((value, i) => (value !== null && Number.isFinite(value) ? [[i, Math.asinh(Math.abs(value))] as const] : []));
  if (known.length < 2) return "";
  const sizes = known.map(([, size]) => size);
  const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
  const x = (i: number) => ((i / Math.max(1, values.length - 1)) * (WIDTH - 2) + 1).toFixed(1);
  const y = (size: number) => (HEIGHT - 2 - ((size - low) / (high - low || 1)) * (HEIGHT - 4)).toFixed(1);
  return known.map(([i, size]) => `${x(i)},${y(size)}`).join(" ");
}
