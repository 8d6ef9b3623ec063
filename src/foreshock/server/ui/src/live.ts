/** The service's event stream: notifies the page of changes, and whether it is connected. */

import { useEffect, useState } from "preact/hooks";

export type Connection = "connecting" | "live" | "lost";

/** A change of a run; `run` is null if any run may have changed (after a reconnect). */
export interface Wake {
  kind: "sample" | "started" | "event" | "reconnected";
  run: string | null;
}

type Listener = (wake: Wake) => void;

const listeners = new Set<Listener>();
const watchers = new Set<(connection: Connection) => void>();
let connection: Connection = "connecting";
let retry = 1000;
/** Milliseconds without an event after which the page reloads, because a silent run sends no events. */
const UNHEARD = 30_000;

function set(next: Connection): void {
  if (connection === next) return;
  connection = next;
  for (const watcher of watchers) watcher(next);
}

let source: EventSource | null = null;
let retrying: ReturnType<typeof setTimeout> | undefined;

/**
 * Opens the stream while the page is visible. A browser opens at most six connections to a service, so tabs in the
 * background close theirs. After a break, the browser reconnects with Last-Event-ID.
 */
export function connect(): void {
  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", close);
  addEventListener("pageshow", follow);
  setInterval(() => {
    if (document.hidden) return;
    for (const listener of listeners) listener({ kind: "sample", run: null });
  }, UNHEARD);
  follow();
}

function follow(): void {
  if (document.hidden) close();
  else if (!source) open();
}

function close(): void {
  clearTimeout(retrying);
  source?.close();
  source = null;
}

function open(): void {
  source = new EventSource(new URL("v1/stream", document.baseURI));
  const wake = (kind: Wake["kind"]) => (event: MessageEvent<string>) => {
    const { run } = JSON.parse(event.data) as { run: string };
    for (const listener of listeners) listener({ kind, run });
  };
  let opened = connection === "connecting"; // the first connection: everything has just been loaded
  source.onopen = () => {
    if (opened) return set("live");
    opened = true;
    for (const listener of listeners) listener({ kind: "reconnected", run: null });
    retry = 1000;
    set("live");
  };
  source.onerror = () => {
    opened = false;
    set("lost");
    if (source?.readyState !== EventSource.CLOSED) return; // the browser reconnects automatically
    close();
    retrying = setTimeout(follow, retry);
    retry = Math.min(retry * 2, 15_000);
  };
  source.addEventListener("sample", wake("sample"));
  source.addEventListener("started", wake("started"));
  for (const kind of ["verdict", "switched", "command", "finished", "incident", "acknowledged", "described", "deleted"]) source.addEventListener(kind, wake("event"));
}

export function useConnection(): Connection {
  const [state, setState] = useState(connection);
  useEffect(() => {
    watchers.add(setState);
    setState(connection);
    return () => void watchers.delete(setState);
  }, []);
  return state;
}

/** Calls the listener at every change; returns a function that unsubscribes it. */
export function listen(listener: Listener): () => void {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}
