/** Small parts that several views share. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Problem } from "./api";
import { ago, moment, number } from "./format";

export function State({ status }: { status: string }) {
  return <span class={`state ${status}`}>{status}</span>;
}

/** Risk as a number and a bar; at 1 the head is warned about. */
export function Risk({ value }: { value: number | null }) {
  if (value === null) return <span class="muted">not recorded</span>;
  const share = Math.max(0, Math.min(1, value));
  return (
    <span class="risk">
      <meter min={0} max={1} low={0.5} high={0.8} optimum={0} value={share} aria-label="risk" />
      <span>{Number.isFinite(value) ? value.toFixed(2) : number(value)}</span>
    </span>
  );
}

/** How long ago something was, kept true while nothing else moves. */
export function Ago({ at }: { at: number }) {
  const [, setTurn] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setTurn((turn) => turn + 1), 5000);
    return () => clearInterval(timer);
  }, []);
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

/** A real link (it can be opened in a new tab) that does not reload the page. */
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

/** The page's address for a set of runs; it can be bookmarked and shared. */
export function address(runs: readonly string[]): string {
  return runs.length ? `?runs=${runs.map(encodeURIComponent).join(",")}` : "?";
}
