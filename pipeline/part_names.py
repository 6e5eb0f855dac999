"""Names of parts, as commits and manifests give them: data, so they are looked at before they become paths."""

from __future__ import annotations

import re

from pipeline.errors import PermanentError


def checked_part_name(name: str) -> str:
    """The name of a part as a commit or a manifest gives it. Raises PermanentError for one that `write_part` never
    gives: it might lead out of the output's folder.
    """
    if re.fullmatch(r"data/\w[\w.-]*\.parquet", name) is None:
        raise PermanentError(f"a part must be called data/NAME.parquet, got {name!r}")
    return name
