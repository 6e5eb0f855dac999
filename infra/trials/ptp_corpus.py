"""Write the corpus of the code model (workers/ptp/corpus.py): ptp_corpus.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

from workers.ptp.corpus import read_sources, standard_library, write_corpus

HELD_OUT = 0.05
"""The share of files that no model learns from."""


def main(folder: str) -> None:
    sources = list(read_sources(standard_library()))
    write_corpus(sources, Path(folder), HELD_OUT, prompts=4096, bench=64)
    print(f"{len(sources)} files, {sum(len(source.text) for source in sources) / 1e6:.1f} million characters")


if __name__ == "__main__":
    main(sys.argv[1])
