"""Where the shipped files are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunewatch import share
from tunewatch.share import share_path


def test_the_repository_serves_an_editable_install() -> None:
    assert share_path("prometheus", "prometheus.yml").samefile(
        Path(__file__).parents[1] / "prometheus" / "prometheus.yml"
    )


def test_an_installed_wheel_serves_its_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "tunewatch"
    rules = package / "share" / "prometheus" / "rules"
    rules.mkdir(parents=True)
    monkeypatch.setattr(share, "_PACKAGE", package)

    assert share_path("prometheus", "rules") == rules


def test_a_missing_file_names_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trainer" / "tunewatch"
    monkeypatch.setattr(share, "_PACKAGE", package)

    with pytest.raises(FileNotFoundError) as failure:
        share_path("grafana", "nothing.json")

    assert str(package / "share" / "grafana" / "nothing.json") in str(failure.value)
    assert str(tmp_path / "grafana" / "nothing.json") in str(failure.value)
