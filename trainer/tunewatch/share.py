"""Finds the files that tunewatch ships beside its code: `prometheus/`, `grafana/`, `examples/`.

A wheel carries them inside the package, as `tunewatch/share/`. An editable install does not see the
wheel's extra files, so there they are found in the repository.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def share_path(*parts: str) -> Path:
    """The path of a shipped file or folder, for example `share_path("prometheus", "rules")`.

    Raises FileNotFoundError, which names the places looked at, when no shipped file has that name.
    """
    places = [root.joinpath(*parts) for root in (_PACKAGE / "share", _PACKAGE.parents[1])]
    for place in places:
        if place.exists():
            return place
    raise FileNotFoundError(
        f"{'/'.join(parts)} is not among the files shipped with tunewatch: "
        f"neither {places[0]} (an installed wheel) nor {places[1]} (a repository) exists"
    )
