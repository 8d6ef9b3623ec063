/** Growing curves: after the first load only new points are fetched, with one request for all charts. */

import { api, type CurveName } from "./api";
import type { CurveLine } from "./service";

const MAX_POINTS = 600;

interface Steps {
  from_step?: number;
  to_step?: number;
}

export class LiveSeries {
  private line: CurveLine | null = null;

  constructor(
    private readonly run: string,
    private readonly name: CurveName,
    private readonly steps: Steps,
  ) {}

  /** The line before its first points. */
  blank(): CurveLine {
    const [metric, layer = null, head = null] = this.name.split(":");
    const number = (text: string | null) => (text === null ? null : Number(text));
    const none = { steps: [], low: [], high: [], last: [], worst_head: [null] };
    return { metric: metric!, unit: "", layer: number(layer), head: number(head), ...none };
  }

  /** Loads the line: all of it if `fresh`, otherwise from the second-to-last point, because the last may still change. */
  async load(fresh: boolean): Promise<CurveLine> {
    const resume = this.line?.steps.at(-2);
    if (fresh || !this.line || resume === undefined || this.line.steps.length > 2 * MAX_POINTS) {
      this.line = await ask(this.run, this.name, this.steps);
    } else {
      const newer = await ask(this.run, this.name, { ...this.steps, from_step: resume + 1 });
      this.line = extend(this.line, newer);
    }
    return this.line;
  }
}

type Answer = [done: (line: CurveLine) => void, failed: (error: unknown) => void];

/** Pending requests by run and range of steps; requests of the same moment are sent as one. */
const questions = new Map<string, { run: string; steps: Steps; lines: Map<CurveName, Answer[]> }>();

function ask(run: string, name: CurveName, steps: Steps): Promise<CurveLine> {
  const key = JSON.stringify([run, steps.from_step, steps.to_step]);
  if (!questions.size) setTimeout(send);
  if (!questions.has(key)) questions.set(key, { run, steps, lines: new Map() });
  const { lines } = questions.get(key)!;
  return new Promise((...answer) => lines.set(name, [...(lines.get(name) ?? []), answer]));
}

function send(): void {
  const all = [...questions.values()];
  questions.clear();
  for (const { run, steps, lines } of all) {
    const answers = [...lines.values()];
    api.curves(run, { line: [...lines.keys()], ...steps, max_points: MAX_POINTS }).then(
      (found) => answers.forEach((of, i) => of.forEach(([done]) => done(found[i]!))),
      (error: unknown) => answers.forEach((of) => of.forEach(([, failed]) => failed(error))),
    );
  }
}

/** Joins two lines: the older one up to the start of the newer one. */
function extend(line: CurveLine, newer: CurveLine): CurveLine {
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
