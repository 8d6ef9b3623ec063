/** Dark or light theme: the system's preference until the user chooses. */

import { useEffect, useState } from "preact/hooks";

const system = matchMedia("(prefers-color-scheme: dark)");

export function useTheme(): [dark: boolean, toggle: () => void] {
  const [chosen, setChosen] = useState(localStorage.getItem("foreshock.theme"));
  const [preferred, setPreferred] = useState(system.matches);
  const dark = chosen === null ? preferred : chosen === "dark";
  useEffect(() => {
    const changed = () => setPreferred(system.matches);
    changed(); // it may have changed before this effect ran
    system.addEventListener("change", changed);
    return () => system.removeEventListener("change", changed);
  }, []);
  useEffect(() => {
    if (chosen === null) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
  }, [chosen]);
  const toggle = () => {
    const next = dark ? "light" : "dark";
    localStorage.setItem("foreshock.theme", next);
    setChosen(next);
  };
  return [dark, toggle];
}
