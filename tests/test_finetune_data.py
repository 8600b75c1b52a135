"""Rows: which are found, and which are refused without being quoted."""

import json

import pytest

from tunewatch.finetune.config import DatasetSection
from tunewatch.finetune.data import check_jsonl, held_out_prompts, load_data, texts
from tunewatch.finetune.errors import ConfigError, DataError, MissingFileError

CANARY = "canary-7f3e91"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def load(seed=1, **section):
    return load_data(DatasetSection(**section), seed=seed)


def test_messages_with_an_evaluation_file(tmp_path):
    train = write(tmp_path / "t.jsonl", [chat("a", "b"), chat("c", "d"), chat("e", "f")])
    held_out = write(tmp_path / "e.jsonl", [chat("q", "r")])
    data = load(path=train, eval_path=held_out)
    assert (data.format, len(data.train), len(data.eval)) == ("messages", 3, 1)
    assert list(held_out_prompts(data, 5)) == [([{"role": "user", "content": "q"}], "r")]
    assert list(texts(data)) == ["a", "b", "c", "d", "e", "f"]


def test_prompt_and_completion(tmp_path):
    path = write(
        tmp_path / "t.jsonl", [{"prompt": f"p{i}", "completion": f"c{i}", "id": i} for i in range(10)]
    )
    data = load(path=path, eval_fraction=0.2)
    assert (data.format, len(data.train), len(data.eval)) == ("prompt_completion", 8, 2)
    assert sorted(data.train.column_names) == ["completion", "prompt"], "other columns are left out"
    everything = [*data.train["prompt"], *data.eval["prompt"]]
    assert sorted(everything) == sorted(f"p{i}" for i in range(10)), "each row is in one of the two"


def test_the_split_depends_on_the_seed_alone(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"text": str(i)} for i in range(50)])
    assert load(path=path, eval_fraction=0.2).eval["text"] == load(path=path, eval_fraction=0.2).eval["text"]
    assert (
        load(path=path, eval_fraction=0.2).eval["text"] != load(2, path=path, eval_fraction=0.2).eval["text"]
    )


def test_a_field_with_another_name(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"body": "one two three four", "text": "not this"}])
    data = load(path=path, text_field="body", eval_path=path)
    assert data.train["text"][:] == ["one two three four"]
    assert list(held_out_prompts(data, 1)) == [("one two", "three four")]


def test_a_folder_saved_by_datasets(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "saved")
    data = load(path=str(tmp_path / "saved"), eval_split="test")
    assert (len(data.train), len(data.eval)) == (3, 1)
    with pytest.raises(ConfigError, match=r"dataset.split: no split 'tests' in saved; found: train, test"):
        load(path=str(tmp_path / "saved"), eval_split="tests")


def test_the_hash_follows_the_rows(tmp_path):
    first = load(path=write(tmp_path / "t.jsonl", [{"text": "a"}])).hash
    second = load(path=write(tmp_path / "t.jsonl", [{"text": "b"}])).hash
    assert first.startswith("sha256:") and first != second


def refused(tmp_path, content, **section):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        load(path=str(file), **section)
    assert CANARY not in str(caught.value)
    return str(caught.value)


def test_rows_that_are_refused(tmp_path):
    good = json.dumps(chat(CANARY, "b")) + "\n"
    assert refused(tmp_path, "") == "rows.jsonl is empty"
    assert refused(tmp_path, "\n \n") == "rows.jsonl is empty"
    assert (
        refused(tmp_path, good + '{"messages": "' + CANARY)
        == "rows.jsonl, line 2: not valid JSON at column 14"
    )
    assert refused(tmp_path, good + "\n" + f'["{CANARY}"]') == "rows.jsonl, line 3: not a JSON object"
    assert refused(tmp_path, good.encode() + b'{"text": "\xff' + CANARY.encode() + b'"}') == (
        "rows.jsonl, line 2: not UTF-8"
    )
    assert refused(tmp_path, good + json.dumps({"text": CANARY})) == (
        "rows.jsonl, line 2: no 'messages'; found: text"
    )
    assert refused(tmp_path, good + json.dumps({"messages": CANARY})) == (
        "rows.jsonl, line 2: 'messages' must be a list of objects with 'role' and 'content'"
    )
    assert refused(tmp_path, json.dumps({"question": CANARY, "answer": CANARY})) == (
        "rows.jsonl has none of messages, prompt + completion, text; found: question, answer; "
        "set dataset.messages_field or dataset.text_field"
    )
    assert refused(tmp_path, json.dumps({"question": CANARY}), text_field="questions") == (
        "dataset.text_field: no field 'questions' in rows.jsonl; found: question; did you mean 'question'?"
    )
    assert refused(tmp_path, json.dumps({"text": CANARY}), eval_fraction=0.1) == (
        "dataset.eval_fraction: 0.1 of 1 rows leaves one of the two sets empty"
    )


def test_an_empty_evaluation_set(tmp_path):
    train = write(tmp_path / "t.jsonl", [chat("a", "b")])
    with pytest.raises(DataError, match=r"^e\.jsonl is empty$"):
        load(path=train, eval_path=write(tmp_path / "e.jsonl", []))


def test_sets_of_two_formats(tmp_path):
    train = write(tmp_path / "t.jsonl", [chat("a", "b")])
    with pytest.raises(
        DataError, match="training set is in messages format, but the evaluation set in text format"
    ):
        load(path=train, eval_path=write(tmp_path / "e.jsonl", [{"text": "x"}]))


def test_missing_files(tmp_path):
    write(tmp_path / "train.jsonl", [chat("a", "b")])
    with pytest.raises(
        MissingFileError, match=r"not found: tain\.jsonl .*; did you mean 'train\.jsonl'\?"
    ) as caught:
        load(path=str(tmp_path / "tain.jsonl"))
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(MissingFileError, match=r"there is no folder 'nowhere'"):
        load(path=str(tmp_path / "nowhere" / "train.jsonl"))


def test_the_number_of_rows_without_blank_lines(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert check_jsonl(file) == 2


def test_progress_is_reported_with_bars_on_and_off(tmp_path):
    import datasets

    from tunewatch.finetune.progress import dataset_progress

    rows = datasets.Dataset.from_dict({"text": [CANARY] * 200})
    for switch in (datasets.disable_progress_bars, datasets.enable_progress_bars):
        switch()
        seen = []
        with dataset_progress(lambda step, ratio, seen=seen: seen.append((step, ratio))):
            rows.map(
                lambda row: {"n": len(row["text"])},
                desc="Tokenizing train dataset",
                load_from_cache_file=False,
            )
            rows.map(lambda row: {"m": 1}, desc=CANARY, load_from_cache_file=False)
        assert seen[0] == ("tokenizing", 0.0) and ("tokenizing", 1.0) in seen
        assert CANARY not in repr(seen) and seen[-1] == ("preparing the dataset", 1.0)
        seen.clear()
        rows.map(lambda row: {"n": 2}, load_from_cache_file=False)
        assert seen == [], "the hook is gone afterwards"
