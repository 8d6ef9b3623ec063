/** The frames of a heat map: the newest first, then coarse to fine through the run, the one that is looked at before all. */

import { api } from "./api";
import type { Matrix } from "./service";

const MAX_STEPS = 120;
const MOST_FRAMES = 3 * MAX_STEPS;

export class Frames {
  layers: readonly number[] = [];
  heads: readonly number[] = [];
  /** Steps that can be shown, ascending. */
  steps: readonly number[] = [];
  low = Infinity;
  high = -Infinity;
  /** Largest absolute value of each head so far, [layers x heads]. */
  peaks = new Float32Array();
  private readonly loaded = new Map<number, Float32Array>();
  /** Steps that were asked for and have no value of this metric. */
  private readonly empty = new Set<number>();
  private wanted: number | null = null;
  private filling = false;
  private ended = false;

  constructor(
    private readonly run: string,
    private readonly metric: string,
    private readonly changed: () => void,
  ) {}

  /** Loads the newest frame, then, without being waited for, what is still missing. */
  async refresh(): Promise<void> {
    this.take(Infinity, await api.matrix(this.run, { metric: this.metric, max_steps: MAX_STEPS }));
    void this.fill();
  }

  /** Loads this step next. */
  want(step: number): void {
    if (this.known(step)) return;
    this.wanted = step;
    void this.fill();
  }

  end(): void {
    this.ended = true;
  }

  /** The loaded frame nearest to a step, [layers x heads], NaN where nothing was recorded. */
  at(step: number): { step: number; values: Float32Array } | null {
    let best: number | null = null;
    for (const known of this.loaded.keys()) {
      if (best === null || Math.abs(known - step) < Math.abs(best - step)) best = known;
    }
    return best === null ? null : { step: best, values: this.loaded.get(best)! };
  }

  /** Loads what is missing, one frame at a time. */
  private async fill(): Promise<void> {
    if (this.filling) return;
    this.filling = true;
    try {
      for (let step = this.next(); step !== null && !this.ended; step = this.next()) {
        this.take(step, await api.matrix(this.run, { metric: this.metric, step, max_steps: 0 }));
      }
    } catch {
      // the next refresh says what is wrong, or goes on
    } finally {
      this.filling = false;
    }
  }

  private known(step: number): boolean {
    return this.loaded.has(step) || this.empty.has(step);
  }

  private next(): number | null {
    const wanted = this.wanted;
    this.wanted = null;
    if (wanted !== null && !this.known(wanted)) return wanted; // it may have come while it was waited for
    const near = (this.steps.at(-1)! - this.steps[0]!) / this.steps.length / 2; // as good as the step itself
    for (let stride = 32; stride >= 1; stride /= 2) {
      for (let i = 0; i < this.steps.length; i += stride) {
        const step = this.steps[i]!;
        if (!this.empty.has(step) && Math.abs((this.at(step)?.step ?? Infinity) - step) > near) return step;
      }
    }
    return null;
  }

  /** A long watch leaves many frames behind: those stay that a step is nearest to. */
  private prune(): void {
    if (this.loaded.size <= MOST_FRAMES) return;
    const kept = new Set(this.steps.map((step) => this.at(step)?.step));
    for (const step of this.loaded.keys()) if (!kept.has(step)) this.loaded.delete(step);
  }

  private take(asked: number, matrix: Matrix): void {
    const same = matrix.layers.join() === this.layers.join() && matrix.heads.join() === this.heads.join();
    if (!same) {
      this.loaded.clear(); // the run came back with other layers
      this.peaks = new Float32Array(matrix.layers.length * matrix.heads.length);
    }
    this.layers = matrix.layers;
    this.heads = matrix.heads;
    if (asked === Infinity) this.steps = matrix.steps;
    const values = Float32Array.from(matrix.values.flat(), (value) => value ?? NaN);
    values.forEach((value, i) => {
      if (!Number.isFinite(value)) return;
      this.low = Math.min(this.low, value);
      this.high = Math.max(this.high, value);
      this.peaks[i] = Math.max(this.peaks[i]!, Math.abs(value));
    });
    if (values.every(Number.isNaN)) {
      this.empty.add(asked === Infinity ? (matrix.step ?? 0) : asked);
    } else {
      if (matrix.step !== null) this.loaded.set(matrix.step, values);
      if (asked !== Infinity) this.loaded.set(asked, values);
    }
    this.prune();
    if (!this.ended) this.changed();
  }
}
