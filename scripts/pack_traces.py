"""Packs recordings by columns. `python -P scripts/pack_traces.py FILE.jsonl.gz ...` puts FILE.trace.xz in their place.

A file goes only after what was packed of it has been read back and is equal, text for text.
"""

import sys
from pathlib import Path

from foreshock.lab.recording.packed import PACKED, RECORDED, pack, read_lines, text_of


def main(paths: list[Path]) -> None:
    """Pack each file and say how much smaller all have become. Raises ValueError where a text differs after packing."""
    before = after = 0
    for path in paths:
        lines = read_lines(path)
        packed = path.with_name(path.name.replace(RECORDED, PACKED))
        packed.write_bytes(pack(lines))
        if text_of(read_lines(packed)) != text_of(lines):
            packed.unlink()
            raise ValueError(f"{path} reads otherwise once it is packed; it was left as it is")
        before, after = before + path.stat().st_size, after + packed.stat().st_size
        path.unlink()
    print(f"{len(paths)} recordings: {before:,} bytes, packed {after:,}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
