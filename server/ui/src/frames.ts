/** The frames of a heat map: the newest first, then coarse to fine through the run, the one that is looked at before all. */

import { api, type Matrix } from "./api";

const MAX_STEPS = 120;

export class Frames {
  layers: readonly number[] = [];
  heads: readonly number[] = [];
  /** Steps that can be shown, ascending. */
  steps: readonly number[] = [];
  low = Infinity;
  high = -Infinity;
  /** Largest absolute value of each head so far, [layers x heads]. */
  peaks = new Float32Array();
  failed: Error | null = null;
  private readonly loaded = new Map<number, Float32Array>();
  private wanted: number | null = null;
  private busy = false;
  private ended = false;

  constructor(
    private readonly run: string,
    private readonly metric: string,
    private readonly changed: () => void,
  ) {}

  /** Loads the newest frame and what is still missing. */
  refresh(): void {
    this.wanted = Infinity;
    void this.work();
  }

  /** Loads this step next. */
  want(step: number): void {
    if (this.loaded.has(step)) return;
    this.wanted = step;
    void this.work();
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

  private async work(): Promise<void> {
    if (this.busy) return;
    this.busy = true;
    for (let step = this.next(); step !== null && !this.ended; step = this.next()) {
      try {
        const which = step === Infinity ? { max_steps: MAX_STEPS } : { step, max_steps: 0 };
        this.take(step, await api.matrix(this.run, { metric: this.metric, ...which }));
        this.failed = null;
      } catch (error) {
        this.failed = error as Error;
        break; // the next refresh tries again
      } finally {
        if (!this.ended) this.changed();
      }
    }
    this.busy = false;
  }

  private next(): number | null {
    const wanted = this.wanted;
    this.wanted = null;
    if (wanted !== null) return wanted;
    for (let stride = 32; stride >= 1; stride /= 2) {
      for (let i = 0; i < this.steps.length; i += stride) if (!this.loaded.has(this.steps[i]!)) return this.steps[i]!;
    }
    return null;
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
    if (matrix.step !== null) this.loaded.set(matrix.step, values);
    if (asked !== Infinity) this.loaded.set(asked, values);
  }
}
