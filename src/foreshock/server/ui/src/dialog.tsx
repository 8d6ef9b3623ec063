/** A dialog that restores the focus, the fields of its forms, and the user's name, which the browser remembers. */

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { ErrorNote } from "./parts";

export function Dialog({ title, close, children }: { title: string; close: () => void; children: ComponentChildren }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    // In the layout effect, so that the dialog is open before the user can type.
    const before = document.activeElement;
    dialog.current!.showModal();
    return () => {
      // The pressed button may have been removed, for example after a decision.
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

/** The user's name, with functions to change it and to store it. */
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

/** State of a form, and a function that submits it; after an error the form stays open and shows the error. */
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
  /** Label of the submit button. */
  verb: string;
  close: () => void;
  /** Returns to the fields, if the form asks for confirmation. */
  back?: (() => void) | null;
}

/** The end of a form: error, cancel button and submit button. */
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
