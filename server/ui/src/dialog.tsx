/** A dialog that gives the focus back, and the name of who acts, which this browser remembers. */

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

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
