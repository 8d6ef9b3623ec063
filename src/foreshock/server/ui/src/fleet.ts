/** Search, filters and order of the list of runs, stored in the page's address. */

import type { Catalog, RunSummary } from "./service";

export const STATES = {
  "": "Any state",
  warned: "With a warning",
  training: "Training",
  quiet: "Hung or silent",
  ended: "Ended",
} as const;
export const RISKS = { "": "Any risk", watch: "Above the watch level", alarm: "Above the alarm level" } as const;
export const ORDERS = {
  "": "What needs you first",
  heard: "Last heard from",
  left: "Fewest steps left",
  name: "By name",
} as const;

export interface Asked {
  search: string;
  state: keyof typeof STATES;
  risk: keyof typeof RISKS;
  /** A tag, or NAME=VALUE of a label. */
  label: string;
  sort: keyof typeof ORDERS;
}

/** Parses the address; unknown values are ignored. */
export function asked(address: string): Asked {
  const given = new URLSearchParams(address);
  const one = <T extends string>(name: string, of: Record<T, string>) => {
    const value = given.get(name) ?? "";
    return (value in of ? value : "") as T;
  };
  return {
    search: given.get("q") ?? "",
    state: one("state", STATES),
    risk: one("risk", RISKS),
    label: given.get("label") ?? "",
    sort: one("sort", ORDERS),
  };
}

/** The address for this search. */
export function addressOf({ search, ...rest }: Asked): string {
  const given = Object.entries({ q: search, ...rest }).filter(([, value]) => value);
  return given.length ? `?${new URLSearchParams(given)}` : "?";
}

/** A run's tags, and its labels as NAME=VALUE. Tags cannot contain an equals sign. */
const carried = (run: RunSummary) => [...run.tags, ...Object.entries(run.labels).map(([name, value]) => `${name}=${value}`)];

/** All tags and labels of the runs, most frequent first. */
export function labelsOf(runs: readonly RunSummary[], most = 100): string[] {
  const counts = new Map<string, number>();
  for (const run of runs) {
    for (const label of carried(run)) counts.set(label, (counts.get(label) ?? 0) + 1);
  }
  return [...counts].sort(([, a], [, b]) => b - a).slice(0, most).map(([label]) => label);
}

/** The runs that match, in the requested order. */
export function found(runs: readonly RunSummary[], { search, state, risk, label, sort }: Asked, catalog: Catalog): RunSummary[] {
  const words = search.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const levels = catalog.metrics.find(({ key }) => key === "run.worst_risk")?.levels;
  const least = risk === "alarm" ? levels?.alarm : risk === "watch" ? (levels?.watch ?? levels?.alarm) : undefined;
  return runs
    .filter((run) => {
      if (least !== undefined && !((run.worst_risk ?? -1) >= least - 1e-6)) return false;
      if (label && !carried(run).includes(label)) return false;
      if (state && !isIn(run, state, run.condition)) return false;
      if (!words.length) return true;
      const text = [run.run, run.display_name ?? "", ...run.tags, ...Object.entries(run.labels).flat()].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    })
    .sort(BEFORE[sort]);
}

function isIn(run: RunSummary, state: Asked["state"], is: RunSummary["condition"]): boolean {
  if (state === "warned") return run.active_warnings > 0;
  if (state === "training") return is === "active";
  return state === "quiet" ? is === "hung" || is === "silent" : run.status !== "active";
}

const last = (value: number | null) => (value === null || Number.isNaN(value) ? Infinity : value);
/** Runs that need a person first, ended runs last (both from the service), then by risk. The sort is stable. */
const BEFORE: Record<Asked["sort"], (a: RunSummary, b: RunSummary) => number> = {
  "": (a, b) =>
    b.urgency - a.urgency || (b.worst_risk ?? -1) - (a.worst_risk ?? -1),
  heard: (a, b) => b.last_seen_unix_seconds - a.last_seen_unix_seconds,
  left: (a, b) => last(a.forecast_steps) - last(b.forecast_steps) || (b.worst_risk ?? -1) - (a.worst_risk ?? -1),
  name: (a, b) => a.run.localeCompare(b.run, "en", { numeric: true }),
};
