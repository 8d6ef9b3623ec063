/** Small components that several views share. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Problem } from "./api";
import { ago, moment, number, shorten, steps, timeLeft } from "./format";
import type { Catalog, MetricLevels, RunDetail, RunSummary } from "./service";

/** State of a run: "silent 55 min" without any message, "hung 12 min" with messages but no finished step. */
export function State({ run }: { run: RunSummary }) {
  useTurns();
  const { condition: is, condition_since_unix_seconds: since, severity } = run;
  const wrong = severity === "critical" || severity === "warning" ? severity : "";
  return (
    <span class="states">
      <span class={`state ${is} ${wrong && "wrong"}`}>
        {is}
        {since !== null && ` ${ago(since).replace(" ago", "")}`}
      </span>
      {wrong && (
        <span class="severity" data-level={wrong}>
          {wrong}
        </span>
      )}
    </span>
  );
}

/** A run's name, shortened in the middle, with the full name as tooltip. */
export function Name({ of, most = 48 }: { of: string; most?: number }) {
  return <span title={of}>{shorten(of, most)}</span>;
}

/** Renders every five seconds, so that relative times stay correct. */
function useTurns(): void {
  const [, setTurn] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setTurn((turn) => turn + 1), 5000);
    return () => clearInterval(timer);
  }, []);
}

/** Risk as a number and a bar; at 1 there is a warning about the head. */
export function Risk({ value, levels }: { value: number | null; levels: MetricLevels | null }) {
  if (value === null) return <span class="muted">not recorded</span>;
  const share = Math.max(0, Math.min(1, value));
  return (
    <span class="risk">
      <meter min={0} max={1} low={levels?.watch ?? 1} high={(levels?.alarm ?? 1) - 1e-6} optimum={0} value={share} aria-label="risk" />
      <span>{Number.isFinite(value) ? value.toFixed(2) : number(value)}</span>
    </span>
  );
}

/** Risks from this value on are highlighted. */
export function riskLevels({ metrics }: Catalog): MetricLevels | null {
  return metrics.find(({ key }) => key === "run.worst_risk")?.levels ?? null;
}

/** Table cells with a run's step, loss, risk and warnings. */
export function Standing({ run, catalog }: { run: RunSummary | RunDetail; catalog: Catalog }) {
  return (
    <>
      <td data-label="Step" class="right">
        {steps(run.last_step)}
      </td>
      <td data-label="Loss" class="right">
        {number(run.loss)}
      </td>
      <td data-label="Risk">
        <Risk value={run.worst_risk} levels={riskLevels(catalog)} />
      </td>
      <td data-label="Steps left" class={`right ${run.active_warnings ? "" : "muted"}`}>
        {timeLeft(run)}
      </td>
      <td data-label="Warnings" class="right">
        {run.active_warnings || "none"}
      </td>
    </>
  );
}

/** Relative time of an event, updated automatically. */
export function Ago({ at }: { at: number }) {
  useTurns();
  return <time title={moment(at)}>{ago(at)}</time>;
}

export function ErrorNote({ error }: { error: Error }) {
  const text = error instanceof Problem ? error.message : "The service cannot be reached.";
  return (
    <p class="note error" role="alert">
      {text}
    </p>
  );
}

interface LinkProps {
  to: string;
  go: (address: string) => void;
  class?: string;
  children: ComponentChildren;
}

/** A link that does not reload the page; it can be opened in a new tab. */
export function Link({ to, go, children, ...rest }: LinkProps) {
  const follow = (event: MouseEvent) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    go(to);
  };
  return (
    <a href={to} onClick={follow} {...rest}>
      {children}
    </a>
  );
}

export function Swatch({ colour }: { colour: string }) {
  return <i class="swatch" style={{ background: colour }} />;
}

export function Labels({ labels }: { labels: Record<string, string> }) {
  const entries = Object.entries(labels);
  if (!entries.length) return null;
  return (
    <ul class="labels">
      {entries.map(([name, value]) => (
        <li key={name}>
          <span>{name}</span> {value}
        </li>
      ))}
    </ul>
  );
}
