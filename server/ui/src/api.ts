/** The service's answers, as server/models.py states them, and the calls that fetch them. */

/** JSON has no NaN: the service writes non-finite numbers as words. null means that nothing was counted. */
type Wire = number | "NaN" | "Infinity" | "-Infinity" | null;
type RunStatus = "active" | "completed" | "failed" | "stopped";
export type HeadRef = [layer: number, head: number];

export interface MetricInfo {
  key: string;
  title: string;
  help: string;
  bad: string;
  unit: string;
  per_head: boolean;
}

/** A mode that a head may be switched to, alone or with others. */
export interface ModeChoice {
  name: string;
  does: string;
  cures: string;
  excludes: string[];
}

export interface Catalog {
  metrics: MetricInfo[];
  modes: ModeChoice[];
  default_mode: string;
}

export interface Session {
  login_needed: boolean;
  name: string | null;
  scopes: string[];
  csrf_token: string | null;
}

export interface RunSummary {
  run: string;
  status: RunStatus;
  policy: string | null;
  numerics: string | null;
  mitigation: string | null;
  world_size: number | null;
  ranks: number;
  first_seen_unix_seconds: number;
  last_seen_unix_seconds: number;
  last_step: number | null;
  loss: number | null;
  worst_risk: number | null;
  active_warnings: number;
  /** The shortest forecast of the active warnings. */
  forecast_steps: number | null;
  labels: Record<string, string>;
}

export interface LayerState {
  layer: number;
  name: string;
  heads: number[];
  served_by: string;
  sampled: boolean;
  modes: (string | null)[];
  risk: (number | null)[];
}

export interface ActiveWarning {
  id: string;
  rank: number;
  layer: number | null;
  head: number | null;
  severity: "info" | "warning" | "critical";
  cause: string;
  signal: string;
  raised_step: number;
  step: number;
  forecast_steps: number | null;
  forecast_low_steps: number | null;
  forecast_high_steps: number | null;
  evidence: Record<string, number>;
  sentence: string;
}

export interface RunDetail extends RunSummary {
  versions: Record<string, string>;
  layers: LayerState[];
  warnings: ActiveWarning[];
  latest: Record<string, number | null>;
  agent_dropped: Record<string, number>;
  agent_faults: Record<string, number>;
}

export interface SeriesLine {
  layer: number | null;
  head: number | null;
  steps: number[];
  low: (number | null)[];
  high: (number | null)[];
  last: (number | null)[];
  worst_head: (number | null)[] | null;
}

/** One curve: METRIC of the run, METRIC:LAYER of a layer's worst head, or METRIC:LAYER:HEAD. */
export type CurveName = string;

export interface Matrix {
  step: number | null;
  layers: number[];
  heads: number[];
  values: (number | null)[][];
  steps: number[];
}

export interface CommandRequest {
  who: string;
  reason: string;
  heads: HeadRef[] | null;
  mode: string;
  dry_run: boolean;
}

export interface CommandStatus {
  id: string;
  run: string;
  state: "proposed" | "pending" | "delivered" | "applied" | "refused" | "expired" | "dry_run" | "rejected";
  source: string;
  issued_by: string;
  reason: string;
  heads: HeadRef[] | null;
  mode: string;
  dry_run: boolean;
  created_unix_seconds: number;
  ranks: { rank: number; outcome: string | null; step: number | null; reason: string }[];
  /** Whether the heads' growth stopped; null until enough steps have passed. */
  verification: "verified" | "not arrested" | "unknown" | null;
  undoes: string | null;
  undone_by: string | null;
}

export interface RunEvent {
  id: number;
  run: string;
  kind: "started" | "verdict" | "switched" | "command" | "finished";
  rank: number | null;
  step: number | null;
  unix_seconds: number;
  sentence: string;
  verdict: {
    id: string;
    state: "raised" | "updated" | "cleared";
    severity: string;
    layer: number | null;
    head: number | null;
  } | null;
  switched: { outcome: string; heads: HeadRef[]; before: string[]; after: string[] } | null;
  command: { id: string; state: string; verification: CommandStatus["verification"] } | null;
}

export interface AuditPage {
  rows: {
    sequence: number;
    unix_seconds: number;
    actor: string;
    action: string;
    run: string | null;
    command: string | null;
    details: Record<string, unknown>;
    hash: string;
  }[];
  intact: boolean;
}

/** An error answer of the service, in its own words. */
export class Problem extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

const MOST_EVENTS = 2000;

let csrfToken: string | null = null;

async function call<T>(path: string, init: RequestInit = {}): Promise<T> {
  const headers = new Headers(init.headers);
  if (init.method === "POST") {
    headers.set("Content-Type", "application/json");
    if (csrfToken) headers.set("X-CSRF-Token", csrfToken);
  }
  const response = await fetch(new URL(path, document.baseURI), { ...init, headers, credentials: "same-origin" });
  const text = await response.text();
  if (!response.ok) throw new Problem(response.status, problemText(text, response));
  if (!text) return null as T;
  // A reviver is slow, and non-finite numbers are rare.
  return (/"-?(NaN|Infinity)"/.test(text) ? JSON.parse(text, finite) : JSON.parse(text)) as T;
}

/** Words that stand for non-finite numbers, back to numbers, in the places where numbers travel. */
function finite(this: unknown, key: string, value: unknown): unknown {
  if (key === "latest" || key === "evidence") {
    return Object.fromEntries(Object.entries(value as object).map(([name, item]) => [name, toNumber(item as Wire)]));
  }
  return Array.isArray(this) || NUMERIC.has(key) ? toNumber(value as Wire) : value;
}
const NUMERIC = new Set(["loss", "worst_risk", "forecast_steps", "forecast_low_steps", "forecast_high_steps"]);

function toNumber<T>(value: T | Wire): T | number | null {
  if (value === "NaN") return NaN;
  if (value === "Infinity") return Infinity;
  return value === "-Infinity" ? -Infinity : (value as T | number | null);
}

function problemText(text: string, response: Response): string {
  try {
    const problem = JSON.parse(text) as { detail?: string; errors?: { where: string; message: string }[] };
    const errors = (problem.errors ?? []).map((error) => `${error.where}: ${error.message}`);
    return [problem.detail, ...errors].filter(Boolean).join(" — ") || response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

type Parameter = string | number | null | undefined;

function query(parameters: Record<string, Parameter | readonly string[]>): string {
  const given = Object.entries(parameters).flatMap(([key, value]) =>
    [value].flat().flatMap((item) => (item === null || item === undefined ? [] : [[key, String(item)]])),
  );
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

/** A run's id may contain slashes; the service takes it percent-encoded. */
const at = (run: string) => `v1/runs/${encodeURIComponent(run)}`;

export const api = {
  async session(): Promise<Session> {
    const session = await call<Session>("v1/session");
    csrfToken = session.csrf_token;
    return session;
  },
  login: (token: string) => call<unknown>("v1/login", { method: "POST", body: JSON.stringify({ token }) }),
  catalog: () => call<Catalog>("v1/catalog"),
  runs: async () => (await call<{ runs: RunSummary[] }>("v1/runs")).runs,
  run: (run: string) => call<RunDetail>(at(run)),
  /** In the order of `line`; a line without points where the run has no such head. */
  curves: async (
    run: string,
    of: { line: readonly CurveName[]; from_step?: number; to_step?: number; max_points: number },
  ) => (await call<{ lines: SeriesLine[] }>(`${at(run)}/curves${query(of)}`)).lines,
  matrix: (run: string, of: { metric: string; step?: number; max_steps: number }) =>
    call<Matrix>(`${at(run)}/matrix${query(of)}`),
  /** Newest first, at most MOST_EVENTS of them. */
  async events(run: string): Promise<RunEvent[]> {
    const found: RunEvent[] = [];
    let cursor: string | null = null;
    do {
      const page: { events: RunEvent[]; next_cursor: string | null } = await call(
        `${at(run)}/events${query({ limit: 500, cursor })}`,
      );
      found.push(...page.events);
      cursor = page.next_cursor;
    } while (cursor && found.length < MOST_EVENTS);
    return found;
  },
  commands: async (run: string) => (await call<{ commands: CommandStatus[] }>(`${at(run)}/commands`)).commands,
  command: (run: string, request: CommandRequest) =>
    call<CommandStatus>(`${at(run)}/commands`, {
      method: "POST",
      body: JSON.stringify(request),
      headers: { "Idempotency-Key": crypto.randomUUID() },
    }),
  decide: (id: string, decision: "approve" | "reject", body: { who: string; reason: string }) =>
    call<CommandStatus>(`v1/commands/${encodeURIComponent(id)}/${decision}`, {
      method: "POST",
      body: JSON.stringify(body),
    }),
  undo: (id: string, body: { who: string; reason: string; dry_run: boolean }) =>
    call<unknown>(`v1/commands/${encodeURIComponent(id)}/undo`, { method: "POST", body: JSON.stringify(body) }),
  audit: () => call<AuditPage>(`v1/audit${query({ limit: 200 })}`),
};
