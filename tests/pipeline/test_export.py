"""Exports: which samples, in which split, in what form; each form is read again by what it is made for."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import yaml

from infra.trials.export_memory import measure
from pipeline import storage
from pipeline.errors import ConfigError
from pipeline.exporting.card import percentile
from pipeline.exporting.dedup import SeenDigests, digest
from pipeline.exporting.export import Exported, export
from pipeline.exporting.formats import FORMATS
from pipeline.exporting.nested import top_k
from pipeline.exporting.options import ExportOptions, Filters, parse_range, parse_splits
from pipeline.exporting.selection import best_of_each
from pipeline.exporting.splits import split_of
from pipeline.records import SampleRecord
from tests.pipeline.makers import make_error
from tests.pipeline.outputs import answer, make_output, of_tokens

NO_FILTERS = Filters()
ALL_EXTRAS = ("prompt_ids", "token_ids", "logprobs", "topk")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def loaded(dest: Path | str, split: str = "train") -> list[dict[str, Any]]:
    """The rows as a trainer gets them."""
    rows: list[dict[str, Any]] = datasets.load_dataset(str(dest), split=split).to_list()
    return rows


def exported(
    tmp_path: Path,
    records: list[SampleRecord],
    format_name: str = "messages",
    filters: Filters = NO_FILTERS,
    **options: Any,
) -> tuple[Exported, list[dict[str, Any]]]:
    """What an export of these samples says, and its rows."""
    made = {name: options.pop(name) for name in ("n", "extras", "topk_dtype") if name in options}
    output = make_output(tmp_path, records, **{"extras": ALL_EXTRAS, **made})
    result = export(output, str(tmp_path / "dest"), ExportOptions(format_name, filters=filters, **options))
    return result, loaded(tmp_path / "dest")


def left_out(result: Exported) -> list[int]:
    """How many samples broke each rule, of those that any broke."""
    return [count for _, count in result.left_out if count]


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_every_format_loads_with_datasets(tmp_path: Path, format_name: str, file_format: Any) -> None:
    records = [answer("a"), make_error("b"), answer("c"), answer("d")]
    _, rows = exported(tmp_path, records, format_name, file_format=file_format)
    assert len(rows) == 3
    natural = [file.suffix for file in (tmp_path / "dest" / "data").iterdir()]
    assert natural == [f".{file_format}"]


def test_messages_end_with_the_answer(tmp_path: Path) -> None:
    records = [answer("a", "first"), answer("b", "second", chat=False)]
    _, rows = exported(tmp_path, records)
    assert rows[0] == {
        "id": "a",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "first"},
        ],
    }
    assert rows[1]["messages"] == [
        {"role": "user", "content": "prompt of b"},
        {"role": "assistant", "content": "second"},
    ]


def test_prompt_completion_is_conversational_where_prompts_are(tmp_path: Path) -> None:
    _, rows = exported(tmp_path, [answer("a", "first")], "prompt_completion")
    assert rows[0]["prompt"][1] == {"role": "user", "content": "a"}
    assert rows[0]["completion"] == [{"role": "assistant", "content": "first"}]


def test_prompt_completion_of_strings(tmp_path: Path) -> None:
    _, rows = exported(tmp_path, [answer("a", "first", chat=False)], "prompt_completion")
    assert rows == [{"id": "a", "prompt": "prompt of a", "completion": "first"}]


def test_prompt_completion_takes_no_mixture(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prompts that are all strings or all messages"):
        exported(tmp_path, [answer("a", chat=False), answer("b")], "prompt_completion")


def test_sharegpt_names_the_speakers(tmp_path: Path) -> None:
    _, rows = exported(tmp_path, [answer("a", "first")], "sharegpt")
    assert [turn["from"] for turn in rows[0]["conversations"]] == ["system", "human", "gpt"]
    assert rows[0]["conversations"][2]["value"] == "first"


@pytest.mark.parametrize("chat", [True, False])
def test_openai_batch_has_the_samples_as_choices(tmp_path: Path, chat: bool) -> None:
    records = [answer("a", f"text {i}", i, chat=chat) for i in range(2)]
    exported(tmp_path, records, "openai_batch", n=2)
    (line,) = (tmp_path / "dest" / "data" / "train-00000.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert set(row) == {"id", "custom_id", "response", "error"}
    assert (row["custom_id"], row["error"], row["response"]["status_code"]) == ("a", None, 200)
    body = row["response"]["body"]
    assert body["object"] == ("chat.completion" if chat else "text_completion")
    said = [choice["message"]["content"] if chat else choice["text"] for choice in body["choices"]]
    assert said == ["text 0", "text 1"]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 10, "total_tokens": 12}


def test_openai_batch_is_what_the_client_reads(tmp_path: Path) -> None:
    types = pytest.importorskip("openai.types.chat")
    _, rows = exported(tmp_path, [answer("a", "first")], "openai_batch")
    completion = types.ChatCompletion.model_validate(rows[0]["response"]["body"], strict=True)
    assert completion.choices[0].message.content == "first"


def test_axolotl_has_a_row_for_each_token_and_what_follows(tmp_path: Path) -> None:
    records = [answer("a"), answer("b", finish_reason="length")]
    result, (row,) = exported(tmp_path, records, "axolotl_kd", trailing_tokens=1)
    assert set(row) == {"id", "messages", "logprobs", "target_token_ids"}
    assert row["target_token_ids"] == [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [5, 6], [5, 6]]
    assert row["logprobs"] == [[-0.5, -1.5]] * 7
    assert left_out(result) == [1], "cut off: the end token would be the template's"


def test_axolotl_trains_on_it(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Its own strategy reads the rows, and its own loss is 0 for a student that has the teacher's distributions."""
    strategies = pytest.importorskip("axolotl.prompt_strategies")
    torch = pytest.importorskip("torch")
    loss = pytest.importorskip("axolotl.integrations.kd.topk_logprob.forward_kl").loss
    config = importlib.import_module("axolotl.utils.dict").DictDefault
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    text = "The dog sleeps; the fox runs on."
    ids = (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)
    topk = {"topk_token_ids": [(token, 7) for token in ids], "topk_logprobs": [(-0.5, -1.5)] * len(ids)}
    record = answer("a", text, **of_tokens(len(ids)), **topk, token_logprobs=(-0.5,) * len(ids))
    _, (row,) = exported(tmp_path, [record], "axolotl_kd", trailing_tokens=1)
    ours = config({"field_messages": "messages", "logprobs_field": "logprobs", "chat_template": "tokenizer_default"})
    strategy = strategies.load(
        "axolotl.integrations.kd.chat_template",
        tokenizer,
        config({"sequence_len": 512, "train_on_inputs": False}),
        ours,
    )
    sample = strategy.tokenize_prompt(row)
    places = [place for place, label in enumerate(sample["labels"]) if label != -100]
    assert tuple(sample["input_ids"][place] for place in places) == ids
    assert [sample["target_token_ids"][place][0] for place in places[:-1]] == list(ids[1:])
    logits = torch.full((1, len(sample["input_ids"]), len(tokenizer)), -30.0)
    for place in places:
        following = sample["input_ids"][place + 1] if place != places[-1] else tokenizer.eos_token_id
        logits[0, place, [following, 7]] = torch.tensor([-0.5, -1.5])
    targets = [torch.tensor([sample[f"target_{name}"]]) for name in ("token_ids", "logprobs", "mask")]
    assert float(loss(logits, *targets)) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("length", [None, 9])
def test_distillkit_rows_are_of_the_token_that_follows(tmp_path: Path, length: int | None) -> None:
    _, (row,) = exported(tmp_path, [answer("a")], "distillkit", sequence_length=length)
    padding = [] if length is None else [0, 0]
    assert row["input_ids"] == [8, 9, 1, 2, 3, 4, 5, *padding]
    assert row["attention_mask"] == [1] * 7 + padding
    assert row["labels"] == [-100, 9, 1, 2, 3, 4, -100, *[-100 for _ in padding]]
    counted = [place for place, label in enumerate(row["labels"]) if label >= 0]
    assert [row["token_ids"][place] for place in counted] == [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
    assert np.allclose(np.exp(row["top_values"][0]).sum(), 1.0), "a row without a teacher has finite values"
    assert {len(row["token_ids"]), len(row["top_values"])} == {7 + len(padding)}


def test_distillkit_stacks_as_its_collator_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    _, rows = exported(tmp_path, [answer("a"), answer("b")], "distillkit", sequence_length=16)
    batch = {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}
    logits = torch.randn(2, 16, 32)
    sparse = logits.log_softmax(-1).gather(-1, batch["token_ids"])
    loss = (batch["top_values"].exp() * (batch["top_values"] - sparse)).sum(-1) * (batch["labels"] >= 0)
    assert torch.isfinite(loss).all()
    assert int((batch["labels"] >= 0).sum()) == 10


def test_what_is_longer_than_a_sequence_is_left_out(tmp_path: Path) -> None:
    result, rows = exported(
        tmp_path,
        [answer("a"), answer("b", prompt_tokens=3, prompt_token_ids=(7, 8, 9))],
        "distillkit",
        sequence_length=7,
    )
    assert len(rows) == 1
    assert left_out(result) == [1]


def test_jsonl_holds_every_column(tmp_path: Path) -> None:
    _, rows = exported(tmp_path, [answer("a")], "jsonl", file_format="jsonl")
    assert rows[0]["topk_logprobs"] == [[-0.5, -1.5]] * 5
    assert rows[0]["num_accepted_draft_tokens"] == 2


def test_float16_takes_less_and_loads(tmp_path: Path) -> None:
    records = [answer("a", topk_logprobs=((-0.1, -7.3),) * 5)]
    _, rows = exported(tmp_path, records, "axolotl_kd", topk_dtype="float16")
    assert rows[0]["logprobs"][0] == pytest.approx([-0.1, -7.3], rel=2**-11)
    assert rows[0]["logprobs"][0] != [-0.1, -7.3]
    assert "| top-k: k = 2, float16 | 12 bytes a token" in (tmp_path / "dest" / "README.md").read_text()


@pytest.mark.parametrize(
    ("format_name", "needed"), [("axolotl_kd", "topk"), ("distillkit", "prompt_ids, token_ids, topk")]
)
def test_a_format_says_which_extras_it_needs(tmp_path: Path, format_name: str, needed: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--format {format_name} needs output.extras to hold {needed}, got .*token_ids"
    ):
        exported(tmp_path, [answer("a")], format_name, extras=["token_ids"])


def test_filters_count_each_sample_once(tmp_path: Path) -> None:
    records = [
        make_error("error"),
        answer("kept", "fine"),
        answer("cut", "cut off", finish_reason="length"),
        answer(
            "short",
            "x",
            **of_tokens(1, token_logprobs=(-1.0,), topk_token_ids=((1, 2),), topk_logprobs=((-1.0, -2.0),)),
        ),
        answer("long", "x" * 9, **of_tokens(9)),
        answer("loop", "well, " + "no, " * 40),
        answer("garble", "zq", **of_tokens(5)),
        answer("same", "fine", messages=answer("kept").messages),
    ]
    filters = Filters(("stop",), min_tokens=2, max_tokens=8, acceptance=(1.5, 3.0), no_loops=True, dedup=True)
    result, rows = exported(tmp_path, records, filters=filters)
    assert [row["id"] for row in rows] == ["kept"]
    assert left_out(result) == [1] * 7
    card = (tmp_path / "dest" / "README.md").read_text()
    assert "| `mean_acceptance_length` from 1.5 to 3 | 1 |" in card
    assert "| does not end in a loop (the same piece over and over) | 1 |" in card


def test_equal_texts_of_other_prompts_are_no_duplicates(tmp_path: Path) -> None:
    records = [answer("a", "yes"), answer("b", "yes"), answer("c", "yes", messages=answer("a").messages)]
    _, rows = exported(tmp_path, records, filters=Filters(dedup=True))
    assert [row["id"] for row in rows] == ["a", "b"]


def test_best_takes_no_duplicate_twice(tmp_path: Path) -> None:
    means = [-1.0, -1.0, -3.0, -2.0]
    texts = ["same", "same", "worst", "good"]
    records = [
        answer(uid, text, i, token_logprobs=(mean,) * 5)
        for uid in ("a", "b")
        for i, (text, mean) in enumerate(zip(texts, means, strict=True))
    ]
    result, rows = exported(tmp_path, records, filters=Filters(dedup=True, best=2), n=4)
    assert [row["messages"][-1]["content"] for row in rows] == ["same", "good"] * 2
    assert left_out(result) == [2, 2]


def test_best_needs_logprobs(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--best needs the column token_logprobs, which output\.extras 'logprobs' makes"
    ):
        exported(tmp_path, [answer("a")], filters=Filters(best=1), extras=["token_ids"])


def test_best_of_each_goes_by_the_mean_not_the_sum() -> None:
    table = pa.table({"id": ["a", "a", "a"], "token_logprobs": [[-1.0, -1.0, -1.0], [-2.0], []]})
    assert best_of_each(table, 2).tolist() == [True, False, True]


def test_splits_are_stable_and_keep_a_prompt_together(tmp_path: Path) -> None:
    splits = parse_splits("train=0.5,test=0.5")
    records = [answer(f"row {i}", f"{i} {sample}", sample) for i in range(40) for sample in range(2)]
    result, rows = exported(tmp_path, records, n=2, splits=splits)
    ids = {row["id"] for row in rows}
    assert ids.isdisjoint(row["id"] for row in loaded(tmp_path / "dest", "test"))
    assert ids == {f"row {i}" for i in range(40) if split_of(f"row {i}", splits) == "train"}
    assert sum(files.rows for files in result.files) == 80
    assert 20 < len(rows) < 60


def test_shares_of_splits() -> None:
    splits = parse_splits("train=0.9, validation=0.1")
    counts = Counter(split_of(str(i), splits) for i in range(10_000))
    assert 850 < counts["validation"] < 1150
    assert split_of("7", splits) == split_of("7", parse_splits("train=0.9,test=0.1")).replace("test", "validation")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("train=0.9", "sum to 1, got 'train=0.9'"),
        ("train=0.5,train=0.5", "name each split once"),
        ("train=x", "NAME=SHARE"),
        ("../up=1", "NAME=SHARE"),
        ("train=nan", "NAME=SHARE"),
    ],
)
def test_a_split_that_makes_no_sense_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(rule)):
        parse_splits(text)


def test_ranges() -> None:
    assert parse_range("1.5:3") == (1.5, 3.0)
    assert parse_range(":3") == (float("-inf"), 3.0)
    for text in ("2", "3:2", "a:b", "nan:1"):
        with pytest.raises(ConfigError, match="--acceptance must be LOW:HIGH"):
            parse_range(text)


def test_an_unfinished_job_needs_the_flag_and_gives_what_is_committed(tmp_path: Path) -> None:
    output = make_output(tmp_path, [answer(uid) for uid in "abcd"], unfinished=True)
    with pytest.raises(
        ConfigError, match=r"OUTPUT must be of a finished job, got .* which is planned; --allow-unfinished"
    ):
        export(output, str(tmp_path / "dest"), ExportOptions("messages"))
    export(output, str(tmp_path / "dest"), ExportOptions("messages", allow_unfinished=True))
    assert [row["id"] for row in loaded(tmp_path / "dest")] == ["a", "b"], "not the part that no commit names"
    assert "from a job that was planned" in (tmp_path / "dest" / "README.md").read_text()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    output = make_output(tmp_path, [answer("a")])
    for dest in (output, str(tmp_path), str(tmp_path / "in.parquet")):
        with pytest.raises(ConfigError, match="DEST must be empty or not there"):
            export(output, dest, ExportOptions("messages"))


def test_from_store_to_store(root: str, tmp_path: Path) -> None:
    output = make_output(tmp_path, [answer("a"), answer("b")], output=storage.join(root, "out"))
    dest = storage.join(root, "dest")
    export(output, dest, ExportOptions("jsonl", file_mb=1))
    lines = storage.read_bytes(storage.join(dest, "data", "train-00000.jsonl")).splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b"]


def test_files_are_cut_at_the_size(tmp_path: Path) -> None:
    records = [answer(f"{i}", "x" * 600_000 + str(i)) for i in range(6)]
    _, rows = exported(tmp_path, records, "sharegpt", file_mb=1)
    names = sorted(file.name for file in (tmp_path / "dest" / "data").iterdir())
    assert names == ["train-00000.jsonl", "train-00001.jsonl", "train-00002.jsonl"]
    assert [row["id"] for row in rows] == [f"{i}" for i in range(6)]


def test_card_tells_what_made_it(tmp_path: Path) -> None:
    exported(tmp_path, [answer("a"), answer("b", **of_tokens(9))], "axolotl_kd", license="apache-2.0")
    text = (tmp_path / "dest" / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["license"] == "apache-2.0"
    assert head["configs"][0]["data_files"] == [{"split": "train", "path": "data/train-*"}]
    for line in (
        "| revision | revision-1 |",
        "| sampling.temperature | 0.7 |",
        "| decoding.strategy | suffix (drafts do not change the output) |",
        "| new tokens | 14 |",
        "| new tokens of a sample: 5th, 50th, 95th percentile, most | 5, 5, 9, 9 |",
    ):
        assert line in text
    assert re.search(r"top-k: k = 2, float32 \| 16 bytes a token, \d+\.\d in these files", text)


def test_percentiles() -> None:
    assert [percentile(Counter(range(1, 101)), share) for share in (0.05, 0.5, 0.95)] == [5, 50, 95]


def test_seen_digests_remember_everything() -> None:
    seen = SeenDigests()
    chunks = [[digest(f"{i % 700}") for i in range(start, start + 90)] for start in range(0, 1800, 90)]
    known: set[bytes] = set()
    for chunk in chunks:
        expected = []
        for item in chunk:
            expected.append(item not in known)
            known.add(item)
        assert seen.add(chunk) == expected
    assert len(seen) == 700


def test_a_digest_tells_where_texts_end() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert len(digest("a")) == 16


def test_top_k_of_a_slice() -> None:
    column = pa.chunked_array([pa.array([[[9.0, 9.0]], [[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]])]).slice(1)
    repeated = top_k(column).last_repeated(2)
    assert repeated.to_arrow().to_pylist() == [[[1, 2]] * 3, [[3, 4], *[[5, 6]] * 3]]


def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    """72 MB of text, which would be several times as much if it were held; infra/trials/export_memory.py has more."""
    peaks = []
    for rows in (1, 1200):
        folder = tmp_path / f"{rows}"
        output = make_output(folder, [answer(f"{i}", f"{i} word " * 6000) for i in range(rows)], rows_per_shard=100)
        figures = measure(output, folder / "dest", ["--format", "sharegpt", "--dedup", "--no-loops", "--file-mb", "1"])
        assert figures["code"] == 0
        peaks.append(figures["kb"])
    assert peaks[1] - peaks[0] < 60_000
