/** Loads the frames of a heat map: first the one on display, then the newest, then the rest of the run from coarse to fine. */

import { api } from "./api";
import type { Matrix } from "./service";

const MAX_STEPS = 120;
const MOST_FRAMES = 3 * MAX_STEPS;

export class Frames {
  /** Available steps, ascending. */
  steps: readonly number[] = [];
  low = Infinity;
  high = -Infinity;
  /** Largest absolute value of each head so far, [layers x heads]. */
  peaks: Float32Array;
  private readonly loaded = new Map<number, Float32Array>();
  /** Requested steps without a value of this metric. */
  private readonly empty = new Set<number>();
  private wanted: number | null = null;
  private filling = false;
  private ended = false;

  constructor(
    private readonly run: string,
    private readonly metric: string,
    public layers: readonly number[],
    public heads: readonly number[],
    private readonly changed: () => void,
  ) {
    this.peaks = new Float32Array(layers.length * heads.length);
  }

  /** Loads the newest frame, and starts loading the missing ones in the background. */
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

  /** Loads missing frames one at a time. */
  private async fill(): Promise<void> {
    if (this.filling) return;
    this.filling = true;
    try {
      for (let step = this.next(); step !== null && !this.ended; step = this.next()) {
        this.take(step, await api.matrix(this.run, { metric: this.metric, step, max_steps: 0 }));
      }
    } catch {
      // the next refresh reports the error or continues
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
    if (wanted !== null && !this.known(wanted)) return wanted; // the frame may have been loaded in the meantime
    const near = (this.steps.at(-1)! - this.steps[0]!) / this.steps.length / 2; // a frame this close replaces the requested one
    for (let stride = 32; stride >= 1; stride /= 2) {
      for (let i = 0; i < this.steps.length; i += stride) {
        const step = this.steps[i]!;
        if (!this.empty.has(step) && Math.abs((this.at(step)?.step ?? Infinity) - step) > near) return step;
      }
    }
    return null;
  }

  /** Limits memory while the page stays open: keeps only frames that are nearest to a step. */
  private prune(): void {
    if (this.loaded.size <= MOST_FRAMES) return;
    const kept = new Set(this.steps.map((step) => this.at(step)?.step));
    for (const step of this.loaded.keys()) if (!kept.has(step)) this.loaded.delete(step);
  }

  private take(asked: number, matrix: Matrix): void {
    const same = matrix.layers.join() === this.layers.join() && matrix.heads.join() === this.heads.join();
    if (!same) {
      this.loaded.clear(); // the run restarted with other layers
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
