/** Which empty places of a line are gaps. What is measured every hundredth step has none between its points. */

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

/** The recorded points, with an empty one wherever nothing was recorded for three times what is usual in this line. */
export function withGaps({ steps, low, high, last }: Points): Gapped {
  const recorded = steps.flatMap((_, i) => (last[i] === null || last[i] === undefined ? [] : [i]));
  const distances = recorded.slice(1).map((index, i) => steps[index]! - steps[recorded[i]!]!);
  const usual = distances.toSorted((a, b) => a - b)[Math.floor(distances.length * 0.9)] ?? Infinity;
  const line: Gapped = { steps: [], low: [], high: [], values: [] };
  const empty = (step: number) => {
    line.steps.push(step);
    for (const column of [line.low, line.high, line.values]) column.push(null);
  };
  recorded.forEach((index, i) => {
    const before = recorded[i - 1];
    if (before !== undefined && index > before + 1 && distances[i - 1]! > LONG * usual) empty(steps[before + 1]!);
    line.steps.push(steps[index]!);
    line.low.push(low[index] ?? null);
    line.high.push(high[index] ?? null);
    line.values.push(last[index]!);
  });
  const end = steps.at(-1);
  const newest = line.steps.at(-1);
  if (end !== undefined && newest !== undefined && end - newest > LONG * usual) empty(end);
  return line;
}
