"""Rows: which are found, and which are refused without being quoted."""

import json

import pytest

from tunewatch.finetune.config import DatasetSection
from tunewatch.finetune.data import check_jsonl, held_out_prompts, load_data, texts
from tunewatch.finetune.errors import ConfigError, DataError, MissingFileError
from tunewatch.finetune.overlap import eval_rows_in_train

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


def test_files_by_pattern_and_by_list(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in ("b", "a"):
        write(shards / f"{name}.jsonl", [{"text": f"{name}{i}"} for i in range(2)])
    (shards / ".c.jsonl").write_text("not for us")
    by_pattern = load(path=str(shards / "*.jsonl"))
    assert by_pattern.train["text"][:] == ["a0", "a1", "b0", "b1"], "by name, however the disk lists them"
    by_list = load(path=[str(shards / "a.jsonl"), str(shards / "b.jsonl")])
    assert by_list.train["text"][:] == by_pattern.train["text"][:]
    assert by_list.hash == by_pattern.hash
    other_order = load(path=[str(shards / "b.jsonl"), str(shards / "a.jsonl")])
    assert other_order.train["text"][:] == ["b0", "b1", "a0", "a1"] and other_order.hash != by_list.hash
    assert (by_pattern.name, by_list.name) == ("*.jsonl", "a.jsonl, b.jsonl")
    with pytest.raises(MissingFileError, match=r"no file matches \*\.parquet"):
        load(path=str(shards / "*.parquet"))
    with pytest.raises(MissingFileError, match=r"not found: c\.jsonl"):
        load(path=[str(shards / "a.jsonl"), str(shards / "c.jsonl")])
    write(shards / "b.csv", [])
    with pytest.raises(DataError, match=r"a\.jsonl, b\.csv mixes kinds of files"):
        load(path=[str(shards / "a.jsonl"), str(shards / "b.csv")])


def test_a_split_of_a_single_file_is_honoured_or_refused(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"text": str(i)} for i in range(10)])
    data = load(path=path, split="train[:80%]", eval_split="train[80%:]")
    assert (data.train["text"][:], data.eval["text"][:]) == ([*"01234567"], [*"89"])
    with pytest.raises(ConfigError, match=r"no split 'test' in t\.jsonl"):
        load(path=path, eval_split="test")  # and not all of the training rows once more


def test_streamed_rows_are_never_counted(tmp_path):
    path = write(tmp_path / "t.jsonl", [chat(f"q{i}", f"a{i}") for i in range(5)])
    streamed = load(path=path, streaming=True, eval_path=write(tmp_path / "e.jsonl", [chat("q1", "a1")] * 2))
    assert not hasattr(streamed.train, "__len__")
    assert [row["messages"][0]["content"] for row in streamed.train] == ["q0", "q1", "q2", "q3", "q4"]
    assert streamed.hash == load(path=path).hash, "of the content, as when it is not streamed"
    assert [reference for _, reference in held_out_prompts(streamed, 5)] == ["a1", "a1"]
    assert overlap(streamed) is None
    with pytest.raises(DataError, match=r"^empty\.jsonl is empty$"):
        load(path=write(tmp_path / "empty.jsonl", []), streaming=True)


def test_an_evaluation_set_with_files_of_its_own_is_identified_too(tmp_path):
    train = write(tmp_path / "t.jsonl", [{"text": "a"}])
    held_out = write(tmp_path / "e.jsonl", [{"text": "b"}])
    data = load(path=train, eval_path=held_out)
    assert (data.eval_name, data.eval_hash) == ("e.jsonl", load(path=held_out).hash)
    same = load(path=train, eval_path=train)
    assert (same.eval_name, same.eval_hash) == (None, None)


# -- rows that are in both sets -------------------------------------------------------------------------------


def overlap(data):
    told = []
    found = eval_rows_in_train(data, told.append)
    assert all(0 <= ratio <= 1 for ratio in told)
    return found


def test_the_same_file_for_both(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"text": str(i)} for i in range(2500)])
    assert overlap(load(path=path, eval_path=path)) == 2500


def test_rows_are_compared_by_what_they_say(tmp_path):
    train = write(
        tmp_path / "t.jsonl",
        [
            chat("What is  one?\n", "caf\u00e9"),
            {
                "messages": [
                    {"role": "user", "content": "x", "name": "ada"},
                    {"role": "assistant", "content": "y"},
                ]
            },
            chat("q", "a"),
            chat("q", "a"),
        ],
    )
    held_out = write(
        tmp_path / "e.jsonl",
        [
            chat("What is one?", "cafe\u0301"),  # spaces, and another spelling of the same letter: the same
            chat("q", "a"),
            chat("q", "a"),  # each of them was seen in the training
            chat("Q", "a"),
            chat("a", "q"),
            chat("x", "y"),  # without the name
            chat("qa", ""),
            {"messages": [{"role": "system", "content": "q"}, {"role": "assistant", "content": "a"}]},
        ],
    )
    assert overlap(load(path=train, eval_path=held_out)) == 3


def test_prompts_alone_are_no_rows(tmp_path):
    train = write(
        tmp_path / "t.jsonl", [{"prompt": "p", "completion": "c"}, {"prompt": "pc", "completion": "d"}]
    )
    held_out = write(
        tmp_path / "e.jsonl",
        [
            {"prompt": "p", "completion": "d"},
            {"prompt": "p", "completion": "c"},
            {"prompt": "p", "completion": "cd"},
        ],
    )
    assert overlap(load(path=train, eval_path=held_out)) == 1


def test_duplicates_on_both_sides_of_a_split(tmp_path):
    rows = [{"text": str(i)} for i in range(30)] + [{"text": "twin"}] * 30
    data = load(path=write(tmp_path / "t.jsonl", rows), eval_fraction=0.5)
    twins = sum(text == "twin" for text in data.eval["text"])
    assert 0 < twins < 30
    assert overlap(data) == twins


def test_what_can_not_be_compared_is_unknown(tmp_path, monkeypatch):
    from tunewatch.finetune import overlap as module

    path = write(tmp_path / "t.jsonl", [{"text": str(i)} for i in range(3)])
    assert overlap(load(path=path)) is None, "no evaluation set"
    both = load(path=path, eval_path=path)
    monkeypatch.setattr(module, "MAX_EVAL_ROWS", 2)
    assert overlap(both) is None
    monkeypatch.setattr(module, "MAX_EVAL_ROWS", 3)
    assert overlap(both) == 3
    monkeypatch.setattr(module, "MAX_SECONDS", -1.0)
    assert overlap(both) is None


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
