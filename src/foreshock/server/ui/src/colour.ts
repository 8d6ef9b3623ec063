/**
 * Colours of data. The first two line colours are Okabe and Ito's vermilion and blue. All six stay distinct under
 * protanopia, deuteranopia and tritanopia, which tests/server/ui measures. Heat maps use viridis, or blue to vermilion.
 */

export interface Ink {
  lines: readonly string[];
  warning: string;
  critical: string;
  switched: string;
  axis: string;
  grid: string;
  cursor: string;
  surface: string;
  outline: string;
  neutral: Rgb;
}

type Rgb = readonly [number, number, number];

const LIGHT: Ink = {
  lines: ["#d55e00", "#0072b2", "#5b2a4f", "#99914a", "#8f6bff", "#1b1b1b"],
  warning: "#b36b00",
  critical: "#c23b00",
  switched: "#0072b2",
  axis: "#5c6570",
  grid: "#eceef1",
  cursor: "#8a94a0",
  surface: "#ffffff",
  outline: "#14171a",
  neutral: [240, 241, 243],
};

const DARK: Ink = {
  lines: ["#f0803c", "#56b4e9", "#ffe66d", "#8f5be8", "#b8f5ef", "#c2347f"],
  warning: "#f0b03c",
  critical: "#ff8a5c",
  switched: "#56b4e9",
  axis: "#97a1ad",
  grid: "#232a32",
  cursor: "#6d7884",
  surface: "#151a20",
  outline: "#ffffff",
  neutral: [38, 45, 54],
};

export function ink(dark: boolean): Ink {
  return dark ? DARK : LIGHT;
}

const VIRIDIS: readonly Rgb[] = [
  [68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142],
  [31, 158, 137], [53, 183, 121], [110, 206, 88], [181, 222, 43], [253, 231, 37],
]; // prettier-ignore
const BLUE: Rgb = [0, 114, 178];
const VERMILION: Rgb = [213, 94, 0];

/** 256 colours, RGBA as little-endian words for ImageData. */
export function ramp(diverging: boolean, ink: Ink): Uint32Array {
  const stops = diverging ? [BLUE, ink.neutral, VERMILION] : VIRIDIS;
  return Uint32Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1);
    const low = stops[Math.floor(at)]!;
    const high = stops[Math.ceil(at)]!;
    const [r, g, b] = low.map((value, channel) => Math.round(value + (high[channel]! - value) * (at % 1)));
    return ((255 << 24) | (b! << 16) | (g! << 8) | r!) >>> 0;
  });
}
