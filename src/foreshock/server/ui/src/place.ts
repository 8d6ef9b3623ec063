/** The view that the page's address encodes: ?runs=a,b&head=0.2&metric=head.risk&steps=100-900. */

import type { Head } from "./head";

/** Steps shown in all charts; an end of null is the newest step, a range of null shows all steps. */
export type Range = readonly [from: number, to: number | null] | null;

export interface Place {
  runs: readonly string[];
  head: Head | null;
  /** Shown in the heat map and in the first chart. */
  metric: string | null;
  range: Range;
}

/** Parses the address; unknown values are ignored. */
export function placeOf(search: string): Place {
  const given = new URLSearchParams(search);
  const [, layer, head] = /^(\d+)\.(\d+)$/.exec(given.get("head") ?? "") ?? [];
  const [, from, to] = /^(\d+)-(\d*)$/.exec(given.get("steps") ?? "") ?? [];
  const range: Range = from === undefined ? null : [Number(from), to ? Number(to) : null];
  return {
    runs: [...new Set((given.get("runs") ?? "").split(",").filter(Boolean))],
    head: layer === undefined ? null : { layer: Number(layer), head: Number(head) },
    metric: given.get("metric"),
    range: range && range[1] !== null && range[1] <= range[0] ? null : range,
  };
}

/** The page's address for a set of runs and a view of them; it can be bookmarked and shared. */
export function address(runs: readonly string[], { head, metric, range }: Partial<Place> = {}): string {
  if (!runs.length) return "?";
  const rest = new URLSearchParams();
  if (head) rest.set("head", `${head.layer}.${head.head}`);
  if (metric) rest.set("metric", metric);
  if (range) rest.set("steps", `${range[0]}-${range[1] ?? ""}`);
  return `?runs=${runs.map(encodeURIComponent).join(",")}${rest.size ? `&${rest}` : ""}`;
}
