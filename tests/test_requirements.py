"""docs/requirements.md: each requirement once, and behind it tests that exist, or the word that there are none yet."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
PARTS = (
    "judgement and replay (issue 5)",
    "GPU sidecar (issue 6)",
    "jobs, API and page (issue 7)",
    "dashboards (issue 8)",
    "clusters (issue 9)",
)
NO_TEST = re.compile(
    rf"planned: ({'|'.join(map(re.escape, PARTS))})(: \S.*)?|not yet proven(: \S.*)?|not built: \S.*"
)
A_TEST = re.compile(r"`((tests|prometheus/tests)/[^`]+)`")
HEAD = ["id", "requirement", "proven by"]


class Row(NamedTuple):
    """One line of a table."""

    id: str
    requirement: str
    proofs: list[str]

    @property
    def tests(self) -> list[str]:
        return [match[1] for proof in self.proofs if (match := A_TEST.fullmatch(proof))]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables() -> dict[str, list[Row]]:
    """The rows of each theme; fails on a table of another shape."""
    found = {}
    for section in PAGE.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        head, rule, *lines = [cells(line) for line in text.splitlines() if line.strip()]
        assert head == HEAD and set("".join(rule)) == {"-"}, title
        assert all(len(line) == len(HEAD) for line in lines), title
        found[title] = [Row(id, requirement, proven.split("<br>")) for id, requirement, proven in lines]
    return found


ROWS = [row for rows in tables().values() for row in rows]


def test_every_id_is_there_once_and_in_order_within_its_table() -> None:
    numbers = [[int(row.id.removeprefix("S")) for row in rows] for rows in tables().values()]
    assert all(of_one == sorted(of_one) for of_one in numbers)
    assert sorted(number for of_one in numbers for number in of_one) == list(range(1, 101))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_says_what_is_required_and_what_proves_it(row: Row) -> None:
    assert re.fullmatch(r"\S.{10,}\.", row.requirement)
    for proof in row.proofs:
        assert A_TEST.fullmatch(proof) or NO_TEST.fullmatch(proof), proof
    assert len(row.tests) <= 3
    assert len(set(row.proofs)) == len(row.proofs)


@pytest.mark.parametrize("row", [row for row in ROWS if row.tests], ids=lambda row: row.id)
def test_the_named_tests_exist(row: Row) -> None:
    for test in row.tests:
        file, separator, name = test.partition(": " if ".yml: " in test else "::")
        assert separator, f"{test}: a file alone proves nothing"
        assert (ROOT / file).is_file(), test
        assert name in names_in(file), test


@cache
def names_in(file: str) -> set[str]:
    """Tests of a Python file (functions, and methods as Class::method) or names of the cases of a promtool file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".yml"):
        return {case["name"] for case in yaml.safe_load(text)["tests"]}
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (method for method in node.body if isinstance(method, ast.FunctionDef))
            found |= {f"{node.name}::{method.name}" for method in methods}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}
