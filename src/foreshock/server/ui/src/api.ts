/** The calls that fetch what the service answers; its types are made from its own schema, in service.ts. */

import type {
  AuditPage,
  AuditRow,
  Catalog,
  CommandList,
  CommandRequest,
  CommandStatus,
  CurveLine,
  Curves,
  Decision,
  Description,
  Acknowledgement,
  Incident,
  IncidentList,
  EventList,
  Matrix,
  ResumePlan,
  RunDetail,
  RunEvent,
  RunList,
  RunSummary,
  Session,
  SwitchPlan,
  Undo,
} from "./service";

/** JSON cannot express NaN, so the service sends non-finite numbers as strings. null means that nothing was counted. */
type Wire = number | "NaN" | "Infinity" | "-Infinity" | null;
/** One curve: METRIC of the run, METRIC:LAYER of a layer's worst head, or METRIC:LAYER:HEAD. */
export type CurveName = string;

/** An error response of the service, with its message. */
export class Problem extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** Kinds of events that the history lists; the events of an incident are on its card. */
const TOLD = ["started", "verdict", "switched", "clipped", "checkpoint", "command", "finished", "acknowledged", "described"];
const MOST_EVENTS = 2000;
const MOST_RUNS = 5000;
const MOST_AUDIT_ROWS = 5000;
const AUDIT_ROWS = 200;

let csrfToken: string | null = null;

async function call<T>(path: string, init: RequestInit = {}): Promise<T> {
  const headers = new Headers(init.headers);
  if (init.body !== undefined) headers.set("Content-Type", "application/json");
  if (init.method !== undefined) {
    if (csrfToken) headers.set("X-CSRF-Token", csrfToken);
  }
  const response = await fetch(new URL(path, document.baseURI), { ...init, headers, credentials: "same-origin" });
  const text = await response.text();
  if (!response.ok) throw new Problem(response.status, problemText(text, response));
  if (!text) return null as T;
  // A reviver is slow, and non-finite numbers are rare.
  return (/"-?(NaN|Infinity)"/.test(text) ? JSON.parse(text, finite) : JSON.parse(text)) as T;
}

/** Converts strings for non-finite numbers back to numbers, in every field that contains numbers. */
function finite(this: unknown, key: string, value: unknown): unknown {
  if (key === "latest" || key === "evidence") {
    return Object.fromEntries(Object.entries(value as object).map(([name, item]) => [name, toNumber(item as Wire)]));
  }
  return Array.isArray(this) || NUMERIC.has(key) ? toNumber(value as Wire) : value;
}
const NUMERIC = new Set(["loss", "worst_risk", "forecast_steps", "forecast_low_steps"]);

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

/** A run's id may contain slashes, so it is percent-encoded. */
const at = (run: string) => `v1/runs/${encodeURIComponent(run)}`;

export const api = {
  async session(): Promise<Session> {
    const session = await call<Session>("v1/session");
    csrfToken = session.csrf_token;
    return session;
  },
  login: (token: string) => call<unknown>("v1/login", { method: "POST", body: JSON.stringify({ token }) }),
  catalog: () => call<Catalog>("v1/catalog"),
  logout: () => call<Session>("v1/logout", { method: "POST" }),
  /** At most MOST_RUNS runs, most recently active first. */
  async runs(): Promise<RunSummary[]> {
    const pages = walk((cursor) => call<RunList>(`v1/runs${query({ limit: 500, cursor })}`));
    return gather(pages, ({ runs }) => runs, MOST_RUNS);
  },
  run: (run: string) => call<RunDetail>(at(run)),
  /** In the order of `line`; a line has no points if the run does not have the head. */
  curves: async (
    run: string,
    of: { line: readonly CurveName[]; from_step?: number; to_step?: number; max_points: number },
  ): Promise<CurveLine[]> => (await call<Curves>(`${at(run)}/curves${query(of)}`)).lines,
  matrix: (run: string, of: { metric: string; step?: number; max_steps: number }) =>
    call<Matrix>(`${at(run)}/matrix${query(of)}`),
  /** At most MOST_EVENTS events, newest first. */
  async events(run: string): Promise<RunEvent[]> {
    const pages = walk((cursor) => call<EventList>(`${at(run)}/events${query({ kind: TOLD, limit: 500, cursor })}`));
    return gather(pages, ({ events }) => events, MOST_EVENTS);
  },
  incidents: async (run: string) => (await call<IncidentList>(`${at(run)}/incidents`)).incidents,
  resumePlan: (run: string) => call<ResumePlan>(`${at(run)}/resume-plan`),
  acknowledge: (run: string, body: Acknowledgement) =>
    call<Incident>(`${at(run)}/acknowledge`, { method: "POST", body: JSON.stringify(body) }),
  commands: async (run: string) => (await call<CommandList>(`${at(run)}/commands`)).commands,
  switches: (run: string, mode: string) => call<SwitchPlan>(`${at(run)}/switches?${new URLSearchParams({ mode })}`),
  command: (run: string, request: CommandRequest) =>
    call<CommandStatus>(`${at(run)}/commands`, {
      method: "POST",
      body: JSON.stringify(request),
      headers: { "Idempotency-Key": crypto.randomUUID() },
    }),
  /** Changes display name, tags or notes; an empty value removes one. The run's name does not change. */
  describe: (run: string, body: Description) =>
    call<RunDetail>(at(run), { method: "PATCH", body: JSON.stringify(body) }),
  remove: (run: string, body: Decision) => call<null>(at(run) + query({ ...body }), { method: "DELETE" }),
  decide: (id: string, decision: "approve" | "reject" | "cancel", body: Decision) =>
    call<CommandStatus>(`v1/commands/${encodeURIComponent(id)}/${decision}`, {
      method: "POST",
      body: JSON.stringify(body),
    }),
  undo: (id: string, body: Undo) =>
    call<unknown>(`v1/commands/${encodeURIComponent(id)}/undo`, { method: "POST", body: JSON.stringify(body) }),
  /** At most AUDIT_ROWS rows of these runs, from the newest MOST_AUDIT_ROWS rows of all runs. */
  async audit(runs: readonly string[]): Promise<AuditRow[]> {
    const rows: AuditRow[] = [];
    let read = 0;
    for await (const page of walk((cursor) => call<AuditPage>(`v1/audit${query({ limit: 500, cursor })}`))) {
      read += page.rows.length;
      rows.push(...page.rows.filter((row) => row.run !== null && runs.includes(row.run)));
      if (rows.length >= AUDIT_ROWS || read >= MOST_AUDIT_ROWS) break;
    }
    return rows.slice(0, AUDIT_ROWS);
  },
};

/** Iterates over the pages of a list. */
async function* walk<T extends { next_cursor: string | null }>(page: (cursor: string | null) => Promise<T>) {
  let cursor: string | null = null;
  do {
    const found: T = await page(cursor);
    yield found;
    cursor = found.next_cursor;
  } while (cursor);
}

async function gather<T, U>(pages: AsyncIterable<T>, of: (page: T) => U[], most: number): Promise<U[]> {
  const found: U[] = [];
  for await (const page of pages) {
    found.push(...of(page));
    if (found.length >= most) break;
  }
  return found;
}
