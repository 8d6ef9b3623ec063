/** Formats values for the page. A value that was not recorded is never shown as zero. */

export const NOT_RECORDED = "not recorded";
/** Shown for a forecast if the largest |score| is already above 512. */
export const PAST = "past the limit";

/** About four significant digits with thousands separators; an exponent only if the digits would not fit. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined) return NOT_RECORDED;
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : "−infinite";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-4)) return minus(value.toExponential(2));
  if (Number.isInteger(value) || size >= 1000) return minus(Math.round(value).toLocaleString("en"));
  return minus(String(Number(value.toPrecision(4))));
}

/** Formats a fraction between 0 and 1 as a percentage. */
export function percent(value: number | null | undefined): string {
  if (value === null || value === undefined) return NOT_RECORDED;
  if (!Number.isFinite(value)) return number(value);
  const hundredfold = value * 100;
  const size = Math.abs(hundredfold);
  return minus(`${size >= 10 || size === 0 ? hundredfold.toFixed(0) : Number(hundredfold.toPrecision(2))} %`);
}

/** A whole number of steps. */
export function steps(value: number | null | undefined): string {
  return value === null || value === undefined ? NOT_RECORDED : Math.round(value).toLocaleString("en");
}

/** Short axis label: 1200 becomes 1.2k. */
export function tick(value: number, digits = 4): string {
  const size = Math.abs(value);
  if (size >= 1e6) return minus(`${Number((value / 1e6).toPrecision(digits))}M`);
  if (size >= 1e3) return minus(`${Number((value / 1e3).toPrecision(digits))}k`);
  if (size !== 0 && size < 1e-3) return minus(value.toExponential(0));
  return minus(String(Number(value.toPrecision(6))));
}

/** Describes how long ago a Unix time was. */
export function ago(unixSeconds: number | null | undefined, now = Date.now() / 1000): string {
  if (unixSeconds === null || unixSeconds === undefined) return NOT_RECORDED;
  const seconds = Math.max(0, now - unixSeconds);
  if (seconds < 5) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129_600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86_400)} days ago`;
}

/** Local date and time, for audit rows. */
export function moment(unixSeconds: number): string {
  return new Date(unixSeconds * 1000).toLocaleString("sv-SE");
}

/** The local time of an event of today; the date and time of an earlier one. */
export function clock(unixSeconds: number): string {
  const at = moment(unixSeconds);
  return at.slice(0, 10) === moment(Date.now() / 1000).slice(0, 10) ? at.slice(11) : at.slice(5, 16);
}

/** A readable name of a state or of evidence: query_norm becomes query norm. Modes are not changed, because users type them. */
export function words(name: string): string {
  return name.replaceAll("_", " ").replaceAll("+", " + ");
}

/** The shortest forecast of a run's warnings, in steps until the largest |score| is 512. */
export function timeLeft(run: { active_warnings: number; forecast_steps: number | null }): string {
  if (run.forecast_steps === null) return run.active_warnings ? "no forecast" : "no warning";
  return run.forecast_steps < 1 ? PAST : `about ${steps(roundTo2(run.forecast_steps))}`;
}

/** Rounds a forecast to two significant digits, because it is not more precise. */
export function roundTo2(value: number): number {
  return Number(value.toPrecision(2));
}

/** Shortens a long name in the middle, because its ends distinguish runs. */
export function shorten(name: string, most: number): string {
  const letters = [...name];
  if (letters.length <= most) return name;
  const head = Math.ceil((most - 1) / 2);
  return `${letters.slice(0, head).join("")}…${letters.slice(letters.length - (most - 1 - head)).join("")}`;
}

function minus(text: string): string {
  return text.replace(/^-/, "−").replace("e-", "e−").replace("e+", "e");
}
