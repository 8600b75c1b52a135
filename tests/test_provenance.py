"""What identifies the data and the software of a run, and what of a command and a configuration stays secret."""

import hashlib
import importlib.metadata
import os
import platform
import shutil

import pytest

from tunewatch import provenance
from tunewatch.provenance import (
    dataset_hash,
    hub_dataset_hash,
    is_secret_key,
    library_versions,
    masked,
    masked_command,
    masked_text,
    public_name,
)

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


def test_rows_that_come_go_or_change_places_change_it(tmp_path):
    file = tmp_path / "train.jsonl"

    def of(text, **how):
        file.write_bytes(text.encode(**how))
        return dataset_hash(file)

    one, two = ROWS.splitlines(keepends=True)
    hashes = [of(ROWS), of(ROWS + one), of(one), of(two + one)]
    # The bytes count: what a reader may take for the same is another file.
    hashes += [of(ROWS.replace(": ", ":")), of(ROWS.replace("\n", "\r\n")), of(ROWS, encoding="utf-8-sig")]
    assert len(set(hashes)) == len(hashes)


def test_files_of_a_list_count_in_its_order_and_by_name(tmp_path):
    def files(folder, **contents):
        (tmp_path / folder).mkdir()
        for name, content in contents.items():
            (tmp_path / folder / name).write_text(content)
        return [tmp_path / folder / name for name in contents]

    first = dataset_hash(files("a", x="1", y="2"))
    assert dataset_hash(files("b", x="1", y="2")) == first, "the folder was moved"
    assert dataset_hash(files("c", y="2", x="1")) != first, "the rows come in another order"
    assert dataset_hash(files("d", x="1", y="2")[:1]) == dataset_hash(tmp_path / "d" / "x"), "a list of one"
    assert dataset_hash(tmp_path / "a") == first, "a folder is the list of its files by name"


def test_the_split_of_a_folder_counts_but_not_the_usual_one(tmp_path):
    (tmp_path / "train.jsonl").write_text("1")
    (tmp_path / "test.jsonl").write_text("2")
    hashes = [
        dataset_hash(tmp_path),
        dataset_hash(tmp_path, split="test"),
        dataset_hash(tmp_path, config="en"),
        dataset_hash(tmp_path, split="train[:10]"),
    ]
    assert len(set(hashes)) == 4
    assert dataset_hash(tmp_path, split="train") == hashes[0]


def test_caches_and_bookkeeping_of_datasets_do_not_count(tmp_path):
    import datasets

    rows = {"text": [f"row {i}" for i in range(20)]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "one")
    first = dataset_hash(tmp_path / "one")
    loaded = datasets.load_from_disk(str(tmp_path / "one"))
    loaded.map(lambda row: {"length": len(row["text"])})
    assert any(path.name.startswith("cache-") for path in (tmp_path / "one").iterdir()), "map left a cache"
    assert dataset_hash(tmp_path / "one") == first
    # Saved again by another way: the same rows, another fingerprint.
    loaded.filter(lambda row: True).save_to_disk(tmp_path / "two")
    names = ["state.json", "dataset_info.json"]
    assert [(tmp_path / "one" / n).read_bytes() for n in names] != [
        (tmp_path / "two" / n).read_bytes() for n in names
    ]
    assert dataset_hash(tmp_path / "two") == first
    datasets.Dataset.from_dict({"text": [*rows["text"][:-1], "row x"]}).save_to_disk(tmp_path / "three")
    assert dataset_hash(tmp_path / "three") != first


def test_of_very_large_data_blocks_are_taken_and_the_hash_says_so(tmp_path, monkeypatch):
    block = 1 << 20
    monkeypatch.setattr(provenance, "WHOLE_HASH_BYTES", 8 * block)
    monkeypatch.setattr(provenance, "SAMPLED_BLOCKS", 4)
    folder = tmp_path / "shards"
    folder.mkdir()
    contents = [os.urandom(5 * block), os.urandom(5 * block + 1)]

    def hash_of(*parts):
        for index, part in enumerate(parts):
            (folder / f"{index}.jsonl").write_bytes(part)
        return dataset_hash(folder)

    def changed(part, at):
        return part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :]

    first = hash_of(*contents)
    assert first.startswith("sha256-sampled:") and len(first) == len("sha256-sampled:") + 64
    assert hash_of(*contents) == first
    # The blocks begin at 0, 3 MiB, 6 MiB and 9 MiB (and a bit) of the two files in a row.
    assert hash_of(changed(contents[0], 10), contents[1]) != first, "the first block"
    assert hash_of(contents[0], changed(contents[1], 5 * block)) != first, "the last byte of all"
    assert hash_of(contents[0], changed(contents[1], block + block // 2)) != first, "in the second file"
    assert hash_of(contents[0] + b"x", contents[1][:-1]) != first, "the sizes"
    assert hash_of(changed(contents[0], 2 * block), contents[1]) == first, "a block that was not taken"
    small = tmp_path / "small.jsonl"
    small.write_bytes(contents[0])
    assert dataset_hash(small) == "sha256:" + hashlib.sha256(contents[0]).hexdigest()


def test_a_hub_dataset_is_identified_by_commit_configuration_and_split():
    commit = "c0ffee" + "0" * 34
    base = hub_dataset_hash("a/b", revision=commit, config=None, split="train")
    assert base == hub_dataset_hash("a/b", revision=commit, config=None, split="train")
    others = {
        hub_dataset_hash("a/b", revision=commit.replace("e", "f"), config=None, split="train"),
        hub_dataset_hash("a/b", revision=commit, config="en", split="train"),
        hub_dataset_hash("a/b", revision=commit, config=None, split="test"),
        hub_dataset_hash("a/c", revision=commit, config=None, split="train"),
    }
    assert None not in others and len(others | {base}) == 5


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "c0ffee"])
def test_without_a_commit_nobody_knows_which_rows_a_hub_dataset_holds(revision):
    assert hub_dataset_hash("a/b", revision=revision, config=None, split="train") is None


def test_versions_are_those_installed():
    versions = library_versions()
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["trl"] == importlib.metadata.version("trl")


def test_a_local_path_is_shown_by_its_last_component():
    assert public_name("/home/ada/secret-project/llama") == "llama"
    assert public_name("org/model") == "org/model"


# -- secrets --------------------------------------------------------------------------------------------------

SECRET = "Zq7-9f!x"


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "hub_token",
        "HF_TOKEN",
        "hub-token",
        "api_key",
        "WANDB_API_KEY",
        "apiKey",
        "client_secret",
        "password",
        "db.password",
        "use_auth_token",
        "AWS_SECRET_ACCESS_KEY",
        "TELEGRAM_BOT_TOKEN",
        "passphrase",
    ],
)
def test_names_of_secrets(name):
    assert is_secret_key(name)
    assert SECRET not in repr(masked({"outer": [{name: SECRET}]}))
    assert SECRET not in repr(masked_command(["train.py", f"--{name}={SECRET}", f"--{name}", SECRET]))
    assert SECRET not in repr(masked_command(["env", f"{name}={SECRET}", "train.py"]))
    assert SECRET not in masked_text(f"cd x && {name}={SECRET} python train.py")
    assert SECRET not in masked_text(f'{{"{name}": "{SECRET} {SECRET}", "lr": 1}}')


@pytest.mark.parametrize(
    "name",
    [
        "eos_token",
        "pad_token",
        "bos_token",
        "unk_token",
        "sep_token",
        "max_new_tokens",
        "tokenizer",
        "tokenizer_name",
        "eos_token_id",
        "pad_token_id",
        "num_tokens",
        "include_num_input_tokens_seen",
        "label_key",
        "sort_key",
        "padding",
        "seed",
    ],
)
def test_names_that_only_sound_like_secrets(name):
    assert not is_secret_key(name)
    assert masked({name: "<|end|>"}) == {name: "<|end|>"}
    command = ["train.py", f"--{name}=<|end|>", f"--{name}", "<|end|>", f"{name}=5"]
    assert masked_command(command) == command


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hf_AbCdEfGhIjKlMnOpQrSt", "***"),
        ("curl -H 'Authorization: Bearer abc.def-123' x", "curl -H 'Authorization: Bearer ***' x"),
        ("postgres://ada:p@ss@db.example/rows", "postgres://***@db.example/rows"),
        ("https://h.example/rows?token=abc&split=train", "https://h.example/rows?token=***&split=train"),
        ("pip install hf_transfer", "pip install hf_transfer"),
        ("https://huggingface.co/org/model@main", "https://huggingface.co/org/model@main"),
        ("org/hf_model", "org/hf_model"),
        ("use_auth_token=True", "use_auth_token=True"),
    ],
)
def test_secrets_in_a_text(text, shown):
    assert masked_text(text) == shown
    assert masked_text(shown) == shown


def test_a_command_keeps_what_is_no_secret():
    command = ["python", "train.py", "--use_auth_token", "--lr", "1e-4", "--hub_token", "abc", "--seed", "3"]
    assert masked_command(command) == [
        "python", "train.py", "--use_auth_token", "--lr", "1e-4", "--hub_token", "***", "--seed", "3",
    ]  # fmt: skip


def test_settings_keep_their_shape():
    settings = {
        "hub_token": None,
        "use_auth_token": True,
        "lr": 1e-4,
        "api_key": 12345,
        "names": ["a", "hf_x"],
    }
    assert masked(settings) == {**settings, "api_key": "***"}
