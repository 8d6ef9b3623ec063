/** What changes on the page by itself: the service's event stream, and resources that it wakes. */

import { useEffect, useRef, useState } from "preact/hooks";

export type Connection = "connecting" | "live" | "lost";

/** Something happened to a run; `run` is null when anything may have (a connection came back). */
export interface Wake {
  kind: "sample" | "started" | "event" | "reconnected";
  run: string | null;
}

type Listener = (wake: Wake) => void;

const listeners = new Set<Listener>();
const watchers = new Set<(connection: Connection) => void>();
let connection: Connection = "connecting";
let retry = 1000;

function set(next: Connection): void {
  if (connection === next) return;
  connection = next;
  for (const watcher of watchers) watcher(next);
}

let source: EventSource | null = null;
let retrying: ReturnType<typeof setTimeout> | undefined;

/**
 * Opens the stream, and keeps it open while the page can be seen: a browser has six connections to a service, and tabs
 * in the background shall not hold them. When the stream breaks, the browser comes back with Last-Event-ID.
 */
export function connect(): void {
  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", close);
  addEventListener("pageshow", follow);
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
  let opened = connection === "connecting"; // the first time, everything has just been loaded
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
    if (source?.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
    close();
    retrying = setTimeout(follow, retry);
    retry = Math.min(retry * 2, 15_000);
  };
  source.addEventListener("sample", wake("sample"));
  source.addEventListener("started", wake("started"));
  for (const kind of ["verdict", "switched", "command", "finished"]) source.addEventListener(kind, wake("event"));
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

export interface Resource<T> {
  data: T | null;
  error: Error | null;
  reload: () => void;
}

interface Waking {
  /** Which events make the resource out of date. */
  on: (wake: Wake) => boolean;
  /** At least this long between two loads that samples asked for. */
  pause?: number;
}

/**
 * Loads something now, when `key` changes, and when the stream says that it is out of date. `fresh` is false when only
 * samples came in since the last load.
 */
export function useResource<T>(load: (fresh: boolean) => Promise<T>, key: string, { on, pause = 2000 }: Waking): Resource<T> {
  const [state, setState] = useState<{ key: string; data: T | null; error: Error | null }>({ key, data: null, error: null });
  const [asked, setAsked] = useState(0);
  const now = useRef({ load, on });
  now.current = { load, on };

  useEffect(() => {
    let ended = false;
    let loading = false;
    let timer: ReturnType<typeof setTimeout> | undefined;
    let due = Infinity;
    let finished = 0;
    let fresh = true;

    const start = async () => {
      timer = undefined;
      due = Infinity;
      loading = true;
      const wanted = fresh;
      fresh = false;
      try {
        const data = await now.current.load(wanted);
        if (!ended) setState({ key, data, error: null });
      } catch (error) {
        fresh ||= wanted;
        if (!ended) setState((old) => ({ key, data: old.key === key ? old.data : null, error: error as Error }));
      }
      loading = false;
      finished = performance.now();
      if (again && !ended) wait(again.delay);
      again = null;
    };
    let again: { delay: number } | null = null;
    const wait = (delay: number) => {
      if (loading) {
        again = { delay: Math.min(delay, again?.delay ?? delay) };
        return;
      }
      const at = performance.now() + delay;
      if (at >= due) return;
      clearTimeout(timer);
      due = at;
      timer = setTimeout(() => void start(), delay);
    };
    const listener: Listener = (wake) => {
      if (!now.current.on(wake)) return;
      fresh ||= wake.kind !== "sample";
      wait(wake.kind === "sample" ? Math.max(0, finished + pause - performance.now()) : 50);
    };
    void start();
    listeners.add(listener);
    return () => {
      ended = true;
      clearTimeout(timer);
      listeners.delete(listener);
    };
  }, [key, asked]);

  return {
    data: state.key === key ? state.data : null,
    error: state.key === key ? state.error : null,
    reload: () => setAsked(asked + 1),
  };
}

/** Calls back on the wakes that match, at most once in `pause` milliseconds. */
export function useWake(matches: (wake: Wake) => boolean, callback: () => void, pause: number): void {
  const now = useRef({ matches, callback });
  now.current = { matches, callback };
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let finished = -Infinity;
    const listener: Listener = (wake) => {
      if (timer !== undefined || !now.current.matches(wake)) return;
      timer = setTimeout(
        () => {
          timer = undefined;
          finished = performance.now();
          now.current.callback();
        },
        Math.max(0, finished + pause - performance.now()),
      );
    };
    listeners.add(listener);
    return () => {
      clearTimeout(timer);
      listeners.delete(listener);
    };
  }, [pause]);
}
