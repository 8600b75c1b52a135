"""What identifies the data and the software of a run."""

import hashlib
import importlib.metadata
import os
import platform
import shutil

from tunewatch.provenance import dataset_hash, hub_dataset_hash, library_versions, public_name

ROWS = '{"text": "one"}\n{"text": "two"}\n'


def test_the_hash_of_a_file_is_that_of_its_content(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(ROWS)
    assert dataset_hash(file) == "sha256:" + hashlib.sha256(ROWS.encode()).hexdigest()


def test_touching_copying_and_moving_do_not_change_it(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(ROWS)
    before = dataset_hash(file)
    os.utime(file, (1, 1))
    copy = tmp_path / "elsewhere.jsonl"
    shutil.copyfile(file, copy)
    assert dataset_hash(file) == dataset_hash(copy) == before


def test_one_character_of_one_row_changes_it(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(ROWS)
    before = dataset_hash(file)
    file.write_text(ROWS.replace("two", "twp"))
    assert dataset_hash(file) != before


def test_a_file_larger_than_one_chunk(tmp_path):
    content = os.urandom(3 * (1 << 20) + 17)
    file = tmp_path / "large.parquet"
    file.write_bytes(content)
    assert dataset_hash(file) == "sha256:" + hashlib.sha256(content).hexdigest()


def test_a_folder_counts_names_and_contents_but_not_caches(tmp_path):
    def folder(name, files):
        for path, content in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(content)
        return dataset_hash(tmp_path / name)

    first = folder("a", {"x/1.jsonl": "1", "x/2.jsonl": "2"})
    assert folder("b", {"x/2.jsonl": "2", "x/1.jsonl": "1"}) == first, "the order in which files were made"
    assert folder("c", {"x/1.jsonl": "1", "x/2.jsonl": "2", "cache-0f.arrow": "9", ".lock": ""}) == first
    assert folder("d", {"x/1.jsonl": "2", "x/2.jsonl": "1"}) != first, "contents swapped"
    assert folder("e", {"x/1.jsonl": "12", "x/2.jsonl": ""}) != first, (
        "bytes moved from one file to the other"
    )
    assert folder("f", {"y/1.jsonl": "1", "x/2.jsonl": "2"}) != first, "a file renamed"


def test_a_hub_dataset_is_identified_by_commit_configuration_and_split():
    base = hub_dataset_hash("a/b", revision="c0ffee", config=None, split="train")
    assert base == hub_dataset_hash("a/b", revision="c0ffee", config=None, split="train")
    others = {
        hub_dataset_hash("a/b", revision="c0ffef", config=None, split="train"),
        hub_dataset_hash("a/b", revision="c0ffee", config="en", split="train"),
        hub_dataset_hash("a/b", revision="c0ffee", config=None, split="test"),
        hub_dataset_hash("a/c", revision="c0ffee", config=None, split="train"),
    }
    assert len(others | {base}) == 5


def test_versions_are_those_installed():
    versions = library_versions()
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["trl"] == importlib.metadata.version("trl")


def test_a_local_path_is_shown_by_its_last_component():
    assert public_name("/home/ada/secret-project/llama") == "llama"
    assert public_name("org/model") == "org/model"
