/** The live page, which works without Grafana. */

import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { api } from "./api";
import type { Catalog, Session } from "./service";
import { connect, useConnection } from "./live";
import icon from "./icon.svg";
import { Login } from "./login";
import { ErrorNote, Link } from "./parts";
import { address, placeOf } from "./place";
import { Runs } from "./runs";
import { useTheme } from "./theme";
import { View } from "./view";

/** Retries with growing pauses until there is an answer; returns a function that stops it. */
function retried<T>(ask: () => Promise<T>, done: (answer: T) => void, failed: (error: Error) => void): () => void {
  let ended = false;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const turn = (pause: number) => {
    ask().then(
      (answer) => !ended && done(answer),
      (error: Error) => {
        if (ended) return;
        failed(error);
        timer = setTimeout(() => turn(Math.min(2 * pause, 15_000)), pause);
      },
    );
  };
  turn(1000);
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}

function App() {
  const [search, setSearch] = useState(location.search);
  const [session, setSession] = useState<Session | Error | null>(null);
  const [catalog, setCatalog] = useState<Catalog | null>(null);
  const [dark, toggleTheme] = useTheme();
  const connection = useConnection();
  const { runs } = placeOf(search);
  const known = session instanceof Error ? null : session;
  const entered = known !== null && !known.login_needed;
  const wasIn = useRef(false);
  wasIn.current ||= entered;
  const allowed = (scope: string) => known !== null && (known.scopes.includes(scope) || known.scopes.includes("admin"));
  const may = { act: allowed("act"), delete: allowed("delete") };
  const go = (to: string) => {
    history.pushState(null, "", to);
    setSearch(location.search);
    scrollTo(0, 0);
  };

  useEffect(() => {
    const moved = () => setSearch(location.search);
    addEventListener("popstate", moved);
    return () => removeEventListener("popstate", moved);
  }, []);
  useEffect(
    // A lost connection may mean an expired session; if the service is not reachable, nothing changes here.
    () => retried(api.session, setSession, (error) => setSession((old) => (old && !(old instanceof Error) ? old : error))),
    [connection === "lost"],
  );
  useEffect(() => {
    if (!entered || !allowed("read")) return;
    connect();
    return retried(api.catalog, setCatalog, () => {});
  }, [entered]);
  useEffect(() => {
    document.title = runs.length ? `${runs.join(", ")} · foreshock` : "foreshock";
  }, [search]);
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const typing = event.target instanceof Element && event.target.closest("input, select, textarea, dialog");
      if (!typing && event.key === "t" && !event.ctrlKey && !event.metaKey && !event.altKey) toggleTheme();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [toggleTheme]);

  return (
    <>
      <header class="bar">
        <Link class="brand" to={address([])} go={go}>
          <img src={icon} alt="" width={24} height={24} />
          foreshock
        </Link>
        {!known?.login_needed && (!entered || allowed("read")) && (
          <span class={`connection ${connection}`} role="status">
            {{ connecting: "connecting", live: "live", lost: "connection lost, trying again" }[connection]}
          </span>
        )}
        <button class="quiet" onClick={toggleTheme} title="key t">
          {dark ? "Light" : "Dark"}
        </button>
        {known?.csrf_token && (
          <button class="quiet" onClick={() => void api.logout().then(() => location.reload())}>
            Log out
          </button>
        )}
      </header>
      <main class={connection} tabIndex={-1}>
        {session instanceof Error && <ErrorNote error={session} />}
        {known?.login_needed && <Login ended={wasIn.current} onSession={setSession} />}
        {entered && !allowed("read") && (
          <p class="note error" role="alert">
            The token {known.name} lacks the scope read, which this page needs; it has {known.scopes.join(", ")}. Log in with another one.
          </p>
        )}
        {entered &&
          catalog &&
          (runs.length ? (
            <View key={runs.join()} runs={runs} catalog={catalog} dark={dark} may={may} go={go} />
          ) : (
            <Runs catalog={catalog} go={go} />
          ))}
      </main>
    </>
  );
}

render(<App />, document.getElementById("page")!);
