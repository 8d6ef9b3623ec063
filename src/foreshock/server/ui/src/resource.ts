/** Data of the page: loaded once, and again when the stream reports a change, only while its element is visible. */

import type { RefObject } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Problem } from "./api";
import { listen, type Wake } from "./live";

const LONGEST_PAUSE = 15_000;

/**
 * Loads on request, one load at a time; if only samples arrived, at most once per `pause` milliseconds. Failed requests
 * are retried with growing pauses. Refused requests (4xx) are retried only after the next change.
 */
class Loader {
  private wanted: "everything" | "newest" | null = "everything";
  private loading = false;
  private failures = 0;
  private finished = -Infinity;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private seen = false;

  constructor(
    private readonly load: (fresh: boolean) => Promise<void>,
    private readonly pause: number,
    private readonly soon: number,
  ) {}

  wake({ kind }: Wake): void {
    this.wanted = kind === "sample" && !this.failures ? (this.wanted ?? "newest") : "everything";
    this.failures = Math.min(this.failures, 1); // a change resets the pauses
    this.schedule();
  }

  show(seen: boolean): void {
    this.seen = seen;
    this.schedule();
  }

  end(): void {
    this.seen = false;
    clearTimeout(this.timer);
  }

  private schedule(): void {
    clearTimeout(this.timer);
    if (!this.wanted || this.loading || !this.seen) return;
    const waited = performance.now() - this.finished;
    const usual = this.wanted === "newest" ? this.pause : this.soon;
    const patience = this.failures ? Math.min(this.pause * 2 ** (this.failures - 1), LONGEST_PAUSE) : usual;
    this.timer = setTimeout(() => void this.run(), Math.max(0, patience - waited));
  }

  private async run(): Promise<void> {
    const fresh = this.wanted === "everything";
    this.wanted = null;
    this.loading = true;
    try {
      await this.load(fresh);
      this.failures = 0;
    } catch (error) {
      this.failures += 1;
      const refused = error instanceof Problem && error.status < 500 && error.status !== 429;
      if (!refused) this.wanted = "everything";
    }
    this.loading = false;
    this.finished = performance.now();
    this.schedule();
  }
}

interface When {
  /** Selects the changes that make the data stale. */
  on: (wake: Wake) => boolean;
  /** Least milliseconds between two loads if only samples arrived. */
  pause?: number;
  /** Least milliseconds between two loads after other events; events close together share a load. */
  soon?: number;
  /** False while the element is not visible. */
  seen?: boolean;
}

export interface Resource<T> {
  data: T | null;
  error: Error | null;
}

/**
 * Loads data when `key` changes and when a change makes it stale. `fresh` is true if `load` has to load everything, and
 * false if only samples arrived since the last load.
 */
export function useResource<T>(
  load: (fresh: boolean) => Promise<T>,
  key: string,
  { on, pause = 3000, soon = 50, seen = true }: When,
): Resource<T> {
  const [state, setState] = useState<Resource<T> & { key: string }>({ key, data: null, error: null });
  const now = useRef({ load, on });
  now.current = { load, on };
  const loader = useMemo(
    () =>
      new Loader(async (fresh) => {
        try {
          const data = await now.current.load(fresh);
          setState({ key, data, error: null });
        } catch (error) {
          setState((old) => ({ key, data: old.key === key ? old.data : null, error: error as Error }));
          throw error;
        }
      }, pause, soon),
    [key, pause, soon],
  );
  useEffect(() => {
    const deaf = listen((wake) => now.current.on(wake) && loader.wake(wake));
    return () => {
      deaf();
      loader.end();
    };
  }, [loader]);
  useEffect(() => loader.show(seen), [loader, seen]);
  return state.key === key ? state : { data: null, error: null };
}

/** Whether an element is on the screen or close to it. */
export function useSeen<T extends Element>(): [element: RefObject<T | null>, seen: boolean] {
  const element = useRef<T>(null);
  const [seen, setSeen] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => setSeen(entries.at(-1)!.isIntersecting), {
      rootMargin: "200px",
    });
    observer.observe(element.current!);
    return () => observer.disconnect();
  }, []);
  return [element, seen];
}
