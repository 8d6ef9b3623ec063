/** Asks for a token if the service requires one; the session is stored in a cookie that scripts cannot read. */

import { useState } from "preact/hooks";
import { api } from "./api";
import type { Session } from "./service";
import { ErrorNote } from "./parts";

export function Login({ ended, onSession }: { ended: boolean; onSession: (session: Session) => void }) {
  const [error, setError] = useState<Error | null>(null);
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    const token = String(new FormData(event.currentTarget as HTMLFormElement).get("token"));
    try {
      await api.login(token);
      onSession(await api.session());
    } catch (failure) {
      setError(failure as Error);
    }
  };
  return (
    <form class="card pad login" onSubmit={submit}>
      <h1>Log in</h1>
      {ended && <p role="alert">Your session has ended. Log in again.</p>}
      <p class="muted">This service requires a token. Ask its administrator for one with the scope read, or act to switch heads.</p>
      <input type="text" name="username" autocomplete="username" value="foreshock" hidden readOnly />
      <label class="field">
        <span>Token</span>
        <input name="token" type="password" required autocomplete="current-password" />
      </label>
      {error && <ErrorNote error={error} />}
      <footer>
        <button class="primary">Enter</button>
      </footer>
    </form>
  );
}
