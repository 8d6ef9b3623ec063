/** Maps a value to its position on the colour ramp. The scale covers the whole run, so a colour has one meaning. */

import { PLACE, type Scale as Kind } from "./axis";
import type { Frames } from "./frames";

export interface Scale {
  low: number;
  high: number;
  kind: Kind;
}

/** The scale for a run's values; for a signed metric it is symmetric around zero. */
export function scaleOf({ low, high }: Frames, signed: boolean, scale: Kind): Scale {
  const kind = scale === "log" && low <= 0 ? "symlog" : scale;
  if (low > high) return { low: 0, high: 1, kind };
  if (signed) {
    const reach = Math.max(-low, high) || 1;
    return { low: -reach, high: reach, kind };
  }
  return { low, high: high > low ? high : low + 1, kind };
}

/** Maps values to RGBA words: transparent if not recorded, the end of the ramp for an infinity. */
export function painter({ low, high, kind }: Scale, ramp: Uint32Array): (value: number) => number {
  const place = PLACE[kind];
  const from = place(low);
  const width = place(high) - from;
  return (value) => {
    if (Number.isNaN(value)) return 0;
    const position = Math.round(((place(value) - from) / width) * 255);
    return ramp[Math.max(0, Math.min(255, position))]!;
  };
}
