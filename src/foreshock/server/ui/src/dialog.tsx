/** A dialog that gives the focus back, what its forms are made of, and the name of who acts, which this browser remembers. */

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { ErrorNote } from "./parts";

export function Dialog({ title, close, children }: { title: string; close: () => void; children: ComponentChildren }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    // With what draws it: nobody shall type into a dialog that is not there yet.
    const before = document.activeElement;
    dialog.current!.showModal();
    return () => {
      // What was pressed may be gone by then, as an order that has been decided.
      const back = before instanceof HTMLElement && before.isConnected ? before : document.querySelector("main");
      setTimeout(() => (back as HTMLElement | null)?.focus());
    };
  }, []);
  return (
    <dialog ref={dialog} onClose={close} aria-labelledby="dialog-title">
      <h2 id="dialog-title">{title}</h2>
      {children}
    </dialog>
  );
}

/** Who acts: the name that was kept, what changes it, and what keeps it. */
export function useWho(): [who: string, setWho: (who: string) => void, keep: () => void] {
  const [who, setWho] = useState(localStorage.getItem("foreshock.who") ?? "");
  return [who, setWho, () => localStorage.setItem("foreshock.who", who)];
}

interface FieldProps {
  label: string;
  name: string;
  value: string;
  set: (value: string) => void;
  most: number;
  required?: boolean;
  hint?: string;
}

export function Field({ label, name, value, set, most, required = false, hint }: FieldProps) {
  return (
    <label class="field">
      <span>{label}</span>
      <input
        name={name}
        required={required}
        maxLength={most}
        placeholder={hint}
        autocomplete={name === "who" ? "name" : "off"}
        value={value}
        onInput={(event) => set(event.currentTarget.value)}
      />
    </label>
  );
}

type Sending = "open" | "sending" | Error;

/** How far a form is, and what sends it: an error keeps the form open, and the form says why. */
export function useSending(): [state: Sending, send: (deed: () => Promise<void>) => Promise<void>] {
  const [state, setState] = useState<Sending>("open");
  const send = async (deed: () => Promise<void>) => {
    setState("sending");
    try {
      await deed();
      setState("open");
    } catch (error) {
      setState(error as Error);
    }
  };
  return [state, send];
}

interface EndProps {
  state: Sending;
  /** What the button that sends the form says. */
  verb: string;
  close: () => void;
  /** Back to what was filled in, where the form asks a second time. */
  back?: (() => void) | null;
}

/** The end of a form: what went wrong, the way out, and the button that sends it. */
export function FormEnd({ state, verb, close, back = null }: EndProps) {
  return (
    <>
      {state instanceof Error && <ErrorNote error={state} />}
      <footer>
        <button type="button" onClick={back ?? close}>
          {back ? "Back" : "Cancel"}
        </button>
        <button class="primary" disabled={state === "sending"}>
          {verb}
        </button>
      </footer>
    </>
  );
}
