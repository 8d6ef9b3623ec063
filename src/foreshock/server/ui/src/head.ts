/** Identifies a head of a model. */

export interface Head {
  layer: number;
  head: number;
}

/** The same in the wire format: [layer, head]. */
export type HeadRef = [layer: number, head: number];
