/** From a value to its place on the colour ramp, the same for the whole run, so that a colour always means the same. */

import type { Frames } from "./frames";

export interface Scale {
  low: number;
  high: number;
  logarithmic: boolean;
}

export function scaleOf({ low, high }: Frames, signed: boolean): Scale {
  if (low > high) return { low: 0, high: 1, logarithmic: false };
  if (signed) {
    const reach = Math.max(-low, high) || 1;
    return { low: -reach, high: reach, logarithmic: false };
  }
  return { low, high: high > low ? high : low + 1, logarithmic: low > 0 && high / low > 50 };
}

/** A painter of values: RGBA words; nothing (transparent) where nothing was recorded, the ramp's end for an infinity. */
export function painter({ low, high, logarithmic }: Scale, ramp: Uint32Array): (value: number) => number {
  const place = logarithmic ? Math.log : (value: number) => value;
  const from = place(low);
  const width = place(high) - from;
  return (value) => {
    if (Number.isNaN(value)) return 0;
    const position = Math.round(((place(value) - from) / width) * 255);
    return ramp[Math.max(0, Math.min(255, position))]!;
  };
}
