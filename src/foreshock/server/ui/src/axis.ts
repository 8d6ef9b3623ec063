/** Value axes: linear, logarithmic, or symmetric logarithmic (linear between -1 and 1); the catalogue's `scale`. */

import type { MetricInfo } from "./service";

export type Scale = MetricInfo["scale"];

/** Maps a value to its position on an axis of this kind. */
export const PLACE: Record<Scale, (value: number) => number> = {
  linear: (value) => value,
  log: Math.log,
  symlog: Math.asinh,
};
const VALUE: Record<Scale, (place: number) => number> = { linear: (place) => place, log: Math.exp, symlog: Math.sinh };
const ROOM = 0.08;
const FLAT = 0.05;

/** The limits of an axis for these values, with a margin at both ends; a flat line is centred. */
export function ends(scale: Scale, min: number, max: number): [number, number] {
  if (min === null || max === null || (scale === "log" && min <= 0)) return scale === "log" ? [0.1, 10] : [0, 1];
  const [low, high] = [PLACE[scale](min), PLACE[scale](max)];
  const flat = scale !== "linear" ? FLAT : max === 0 ? 0.01 : Math.abs(max) * 0.1;
  const room = high > low ? Math.max((high - low) * ROOM, scale === "linear" ? 0 : 1e-9) : flat;
  const [from, to] = [VALUE[scale](low - room), VALUE[scale](high + room)];
  return [scale !== "log" && min >= 0 && from < 0 ? 0 : from, to];
}

/** Tick positions of a logarithmic axis: powers of ten, with 2 and 5 in between if there is room, or even steps. */
export function ticks(scale: Scale, from: number, to: number, most: number): number[] {
  const within = (values: number[]) => values.filter((value) => value >= from && value <= to);
  for (const leading of [[1, 2, 5], [1, 3], [1]]) {
    const found = within(decades(scale, leading));
    if (found.length <= most && found.length >= 3) return found;
  }
  const powers = within(decades(scale, [1]));
  if (powers.length > most) {
    const nth = Math.ceil(powers.length / most);
    const zero = Math.max(0, powers.indexOf(0)); // zero is always labelled
    return powers.filter((_, i) => (i - zero) % nth === 0);
  }
  const step = [1, 2, 2.5, 5, 10].map((lead) => lead * 10 ** Math.floor(Math.log10((to - from) / most)));
  const even = step.find((width) => (to - from) / width <= most) ?? to - from;
  const first = Math.ceil(from / even);
  return Array.from({ length: Math.floor(to / even) - first + 1 }, (_, i) => Number(((first + i) * even).toPrecision(12)));
}

function decades(scale: Scale, leading: readonly number[]): number[] {
  const powers = Array.from({ length: 42 }, (_, i) => (scale === "log" ? i - 20 : i));
  const positive = powers.flatMap((power) => leading.map((digit) => Number(`${digit}e${power}`)));
  return scale === "log" ? positive : [...positive.map((value) => -value).reverse(), 0, ...positive];
}
