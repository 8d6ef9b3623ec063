/** Which head of a model. */

export interface Head {
  layer: number;
  head: number;
}

/** The same as it travels: [layer, head]. */
export type HeadRef = [layer: number, head: number];
