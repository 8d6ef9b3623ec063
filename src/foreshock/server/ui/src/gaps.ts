/** Decides which missing points of a line are gaps. A metric that is measured every 100 steps has no gap between two points. */

const LONG = 3;

interface Points {
  steps: readonly number[];
  low: readonly (number | null)[];
  high: readonly (number | null)[];
  last: readonly (number | null)[];
}

interface Gapped {
  steps: number[];
  low: (number | null)[];
  high: (number | null)[];
  values: (number | null)[];
}

/** Returns the recorded points with a null where three times the usual interval passed without a point. */
export function withGaps({ steps, low, high, last }: Points): Gapped {
  const recorded = steps.flatMap((_, i) => (last[i] === null || last[i] === undefined ? [] : [i]));
  const distances = recorded.slice(1).map((index, i) => steps[index]! - steps[recorded[i]!]!);
  const usual = distances.toSorted((a, b) => a - b)[Math.floor(distances.length * 0.9)] ?? Infinity;
  const line: Gapped = { steps: [], low: [], high: [], values: [] };
  const empty = (step: number) => {
    line.steps.push(step);
    for (const column of [line.low, line.high, line.values]) column.push(null);
  };
  const add = (index: number) => {
    line.steps.push(steps[index]!);
    line.low.push(low[index] ?? null);
    line.high.push(high[index] ?? null);
    line.values.push(last[index]!);
  };
  /** No sample at all arrived: far longer than before and after, because samples may also become rarer. */
  const silent = (i: number) =>
    distances[i]! > LONG * Math.max(usual, distances[i - 1] ?? Infinity, distances[i + 1] ?? Infinity);
  recorded.forEach((index, i) => {
    const before = recorded[i - 1];
    if (before === undefined) return add(index);
    if (index > before + 1 && distances[i - 1]! > LONG * usual) empty(steps[before + 1]!);
    else if (silent(i - 1)) empty(steps[before]! + usual);
    add(index);
  });
  const end = steps.at(-1);
  const newest = line.steps.at(-1);
  if (end !== undefined && newest !== undefined && end - newest > LONG * usual) empty(end);
  return line;
}
