/** Curves that grow: after the first load only the newest points are fetched. */

import { api, Problem, type SeriesLine } from "./api";

const MAX_POINTS = 600;
const AT_ONCE = 2;

interface Wanted {
  run: string;
  metric: string;
  layer?: number;
  head?: number;
  from_step?: number;
  to_step?: number;
}

export class LiveSeries {
  private lines: readonly SeriesLine[] = [];

  constructor(private readonly wanted: Wanted) {}

  /** All lines; `fresh` loads everything, otherwise what came after the last point but one (the last may still change). */
  async load(fresh: boolean): Promise<readonly SeriesLine[]> {
    const { run, ...wanted } = this.wanted;
    const known = Math.min(...this.lines.map((line) => line.steps.length));
    const resume = this.lines[0]?.steps.at(-2);
    if (fresh || resume === undefined || known > 2 * MAX_POINTS) {
      this.lines = await ask(run, wanted);
    } else {
      const lines = await ask(run, { ...wanted, from_step: resume + 1 });
      this.lines = this.lines.map((line) => {
        const newer = lines.find((other) => other.layer === line.layer && other.head === line.head);
        return newer ? extend(line, newer) : line;
      });
    }
    return this.lines;
  }
}

/** A run that has no such head has no line; where several are compared, the others still do. */
async function ask(run: string, wanted: Omit<Wanted, "run">): Promise<readonly SeriesLine[]> {
  try {
    return (await inTurn(() => api.series(run, { ...wanted, max_points: MAX_POINTS }))).lines;
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return [];
    throw error;
  }
}

let running = 0;
const waiting: (() => void)[] = [];

/** Few at once, first come, first served: the charts at the top are drawn early instead of all of them late. */
async function inTurn<T>(work: () => Promise<T>): Promise<T> {
  if (running >= AT_ONCE) await new Promise<void>((turn) => waiting.push(turn));
  running++;
  try {
    return await work();
  } finally {
    running--;
    waiting.shift()?.();
  }
}

/** The line up to where the newer one begins, then the newer one. */
function extend(line: SeriesLine, newer: SeriesLine): SeriesLine {
  const from = newer.steps[0] ?? Infinity;
  const keep = line.steps.findLastIndex((step) => step < from) + 1;
  const join = <T>(old: readonly T[], added: readonly T[]): T[] => [...old.slice(0, keep), ...added];
  return {
    ...line,
    steps: join(line.steps, newer.steps),
    low: join(line.low, newer.low),
    high: join(line.high, newer.high),
    last: join(line.last, newer.last),
    worst_head: line.worst_head && newer.worst_head && join(line.worst_head, newer.worst_head),
  };
}
