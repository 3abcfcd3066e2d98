"""Conversations and other rows with answers: what is learned is what transformers says, packed or not."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import NO_LABEL
from flopwise.engine.data.chat import ChatTemplate
from flopwise.engine.data.examples import ExampleData, open_example_data, pack
from flopwise.engine.data.language import open_language_data
from flopwise.engine.data.request import DataRequest
from flopwise.engine.data.rows import Conversation, kind_of, read_row
from flopwise.train.data_checks import check_data
from flopwise.train.request import TrainRequest
from tests.support.data_files import json_lines, quick_disk, request, text_file
from tests.support.tiny_folders import TEMPLATE, VOCABULARY, byte_level

__all__ = ["quick_disk"]
pytestmark = pytest.mark.usefixtures("quick_disk")

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1? häh"},
        {"role": "assistant", "content": "2 – zwei"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ],
    [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}],
]
PLAIN = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
THINKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen3's: the last turn is written otherwise than those before."""


def tokenizer(folder: Path, template: str | None = TEMPLATE, *, begins: bool = True) -> Path:
    byte_level(folder, begins=begins)
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    table: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(table | ({"chat_template": template} if template else {})))
    return folder


def opened(folder: Path, rows: list[Any], template: str | None = TEMPLATE, **more: Any) -> ExampleData:
    place = tokenizer(folder / "tokenizer", template)
    asked: dict[str, Any] = {"sequence_tokens": 256, "vocab": VOCABULARY, "evaluation_share": 0.0, **more}
    return open_example_data(request(folder, json_lines(folder / "rows.jsonl", rows), tokenizer=str(place), **asked))


def learned(data: ExampleData) -> list[tuple[list[int], list[int]]]:
    """(tokens, those of them that have a loss) of every example, in any order."""
    data.lay_out(packed=False)
    batch = data.batch(0, data.count)
    assert batch.lengths is not None
    found = []
    for ids, labels, length in zip(batch.ids, batch.labels, batch.lengths.tolist(), strict=True):
        found.append((ids[:length].tolist(), labels[:length][labels[:length] != NO_LABEL].tolist()))
    return sorted(found)


def text_of(folder: Path, tokens: list[int]) -> str:
    from tokenizers import Tokenizer

    read: str = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")).decode(
        tokens, skip_special_tokens=False
    )
    return read


def answers(folder: Path, data: ExampleData) -> list[str]:
    return sorted(text_of(folder, foretold) for _, foretold in learned(data))


# -- what is learned --------------------------------------------------------------------------------------------------


def test_answers_are_those_that_transformers_marks(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    data = opened(tmp_path, [{"messages": chat} for chat in CHATS])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    expected = []
    for chat in CHATS:
        told = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = told["input_ids"], told["assistant_masks"]
        expected.append((ids[:-1], [token for token, here in zip(ids[1:], mask[1:], strict=True) if here]))
    assert learned(data) == sorted(expected)


@pytest.mark.parametrize(("template", "behind"), [(PLAIN, "<|im_end|>"), (THINKS, "<|im_end|>")])
def test_without_marks_turns_are_found_by_what_comes_before_them(tmp_path: Path, template: str, behind: str) -> None:
    data = opened(tmp_path, [{"messages": chat} for chat in CHATS], template)
    thought = "<think>\n\n</think>\n\n" if template == THINKS else ""
    expected = [thought + "hello", "2 – zwei" + behind + thought + "yes", thought + "yes"]
    assert answers(tmp_path, data) == sorted(f"{said}{behind}" for said in expected)


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": False, "weight": 1}])
def test_messages_that_say_so_are_read_and_not_learned(tmp_path: Path, template: str, mark: dict[str, Any]) -> None:
    asks = [{"role": "user", "content": f"ask {number}"} for number in range(3)]
    said: list[dict[str, Any]] = [{"role": "assistant", "content": f"answer {number}"} for number in range(3)]
    said[1] |= mark
    said[2] |= {"weight": 1}
    rows = [{"messages": [message for pair in zip(asks, said, strict=True) for message in pair]}]
    data = opened(tmp_path, rows, template)
    [(ids, foretold)] = learned(data)
    assert "answer 1" in text_of(tmp_path, ids)
    told = text_of(tmp_path, foretold)
    assert "answer 0" in told and "answer 2" in told and "answer 1" not in told


def test_a_template_that_cannot_tell_is_refused_and_can_be_learned_whole(tmp_path: Path) -> None:
    # When it is asked to go on it writes what stands nowhere in the conversation.
    vague = PLAIN.replace("'<|im_start|>assistant\n'", "'Your turn:'")
    with pytest.raises(FlopwiseError, match=r"rows.jsonl, line 1: which tokens the assistant said cannot be told"):
        opened(tmp_path, [{"messages": CHATS[0]}], vague)
    data = opened(tmp_path, [{"messages": CHATS[0]}], vague, train_on="all")
    [(ids, foretold)] = learned(data)
    assert foretold[:-1] == ids[1:]


def test_other_ways_to_write_a_conversation(tmp_path: Path) -> None:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = [
        {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in chat]} for chat in CHATS
    ]
    paired = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS]
    whole = learned(opened(tmp_path / "a", [{"messages": chat} for chat in CHATS]))
    assert learned(opened(tmp_path / "b", shared)) == whole
    last = opened(tmp_path / "c", paired)
    assert answers(tmp_path / "c", last) == sorted(["hello<|im_end|>", "yes<|im_end|>", "yes<|im_end|>"])
    told = [{"instruction": "hi", "input": "", "output": "hello"}]
    assert learned(opened(tmp_path / "d", told)) == learned(opened(tmp_path / "e", [{"messages": CHATS[0]}]))


def test_prompts_and_instructions_without_a_template(tmp_path: Path) -> None:
    data = opened(tmp_path, [{"prompt": "Q: who?\n", "completion": "A: me"}], None)
    [(ids, foretold)] = learned(data)
    assert text_of(tmp_path, ids) == "<s>Q: who?\nA: me" and text_of(tmp_path, foretold) == "A: me<|im_end|>"
    other = opened(tmp_path / "b", [{"instruction": "add", "input": "1 1", "output": "2"}], None)
    [(ids, foretold)] = learned(other)
    assert text_of(tmp_path / "b", foretold) == "2<|im_end|>"
    assert text_of(tmp_path / "b", ids).endswith("### Instruction:\nadd\n\n### Input:\n1 1\n\n### Response:\n2")
    assert answers(tmp_path / "c", opened(tmp_path / "c", [{"prompt": "a", "completion": "b"}], train_on="all")) == [
        "ab<|im_end|>"
    ]


def test_tokens_with_labels(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}, {"input_ids": [5, 6, 7]}]
    assert learned(opened(tmp_path, rows[:1])) == [([1, 2, 3], [3, 4])]
    assert learned(opened(tmp_path / "b", rows[1:])) == [([5, 6], [6, 7])]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": "hi"}, "a conversation is a list of messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "nobody is called 'nobody'"),
        ({"messages": [{"role": "user"}]}, "says nothing"),
        ({"messages": [{"role": "user", "content": "x", "weight": 0.5}]}, "weight of a message is 0.5"),
        ({"prompt": "a", "completion": 3}, "prompt and completion are two texts"),
        ({"input_ids": [1, 2], "labels": [1]}, "there are 2 input_ids and 1 labels"),
        ({"input_ids": [1, 2], "labels": [1, 9]}, "neither -100 nor the token"),
        ({"input_ids": [1, 999]}, "token 999 is none of the tokenizer's"),
        ({"instruction": 3, "output": "x"}, "instruction, input and output are texts"),
        ({"chosen": "a", "rejected": "b"}, "the task is no comparison"),
        ({"messages": [{"role": "user", "content": "unanswered"}]}, "there is nothing to learn"),
    ],
)
def test_rows_that_are_no_examples_are_told_by_their_line(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(FlopwiseError, match=words) as told:
        opened(tmp_path, [row])
    assert told.value.hint and told.value.why


def test_a_template_is_data(tmp_path: Path) -> None:
    for evil in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception('no') }}",
        "{{ messages | nothing }}",
    ):
        with pytest.raises(FlopwiseError, match="chat template") as told:
            opened(tmp_path, [{"messages": CHATS[0]}], evil)
        assert told.value.hint


def test_special_tokens_and_tools_reach_the_template() -> None:
    chat = ChatTemplate(
        "{{ bos_token }}{{ tools | tojson }}{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
        "{{ m.content }}{% endfor %}{{ strftime_now('%%') }}",
        {"bos_token": "<s>"},
        "test",
    )
    assert chat.render(CHATS[0], tools=[{"name": "ä<b>"}]) == '<s>[{"name": "ä<b>"}]hello%'


# -- sequences --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 90))
@settings(max_examples=60)
def test_packing_keeps_everything_and_fits(lengths: list[int], room: int) -> None:
    rows = pack(np.array(lengths), room)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= room for row in rows)
    # Best fit, the longest first: never more than 11/9 of the fewest, and one (Johnson 1973).
    assert len(rows) <= 11 / 9 * max(1, -(-sum(lengths) // room) + sum(2 * each > room for each in lengths)) + 1


def test_packed_and_unpacked_hold_the_same(tmp_path: Path) -> None:
    dice = random.Random(3)  # noqa: S311
    rows = [{"input_ids": [dice.randrange(200) for _ in range(dice.randrange(2, 30))]} for _ in range(40)]
    data = opened(tmp_path, rows, sequence_tokens=32)
    batch = data.batch(0, data.count)
    assert batch.documents is not None and batch.lengths is not None and data.count < 30
    found = []
    for ids, labels, documents in zip(batch.ids, batch.labels, batch.documents, strict=True):
        begin = 0
        for length in documents.tolist():
            found.append((ids[begin : begin + length].tolist(), labels[begin : begin + length].tolist()))
            begin += length
        assert (labels[begin:] == NO_LABEL).all()
    assert sorted(found) == learned(data)
    assert [row["input_ids"][:-1] for row in sorted(rows, key=lambda row: row["input_ids"])] == [
        ids for ids, _ in sorted(found)
    ]


def test_what_is_too_long_is_cut_or_split_and_told(tmp_path: Path) -> None:
    labels = [-100] * 10 + list(range(10, 20))
    rows = [{"input_ids": list(range(20))}, {"input_ids": list(range(20)), "labels": labels}]
    data = opened(tmp_path, rows, sequence_tokens=8)
    assert learned(data) == [
        (list(range(0, 8)), list(range(1, 9))),
        (list(range(8, 16)), list(range(9, 17))),
        (list(range(16, 19)), list(range(17, 20))),
    ]
    told = " ".join(data.notes)
    assert "1 of 2 examples are longer than 8 tokens and were cut" in told and "1 examples have no answer" in told


def test_the_order_is_taken_up_anywhere_and_some_is_held_out(tmp_path: Path) -> None:
    data = opened(tmp_path, [{"input_ids": [number, number]} for number in range(100)], evaluation_share=0.05)
    assert (data.evaluation_count, data.examples) == (5, 95)
    data.lay_out(packed=False)
    first, again = data.batch(0, 95).ids, np.concatenate([data.batch(0, 40).ids, data.batch(40, 55).ids])
    assert (first == again).all() and len({int(row[0]) for row in first}) == 95
    held = {int(row[0]) for batch in data.evaluation(2) for row in batch.ids}
    assert len(held) == 5 and not held & {int(row[0]) for row in first}


def test_one_cache_serves_every_length(tmp_path: Path) -> None:
    rows = [{"messages": chat} for chat in CHATS]
    names = {opened(tmp_path, rows, sequence_tokens=length).describe()["cache"] for length in (64, 256)}
    assert len(names) == 1
    assert opened(tmp_path, rows, train_on="all").describe()["cache"] not in names


# -- files ------------------------------------------------------------------------------------------------------------


def test_forms_of_files(tmp_path: Path) -> None:
    rows = [{"messages": chat} for chat in CHATS]
    place = str(tokenizer(tmp_path / "tokenizer"))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "b.json").write_text(lines)
    (tmp_path / "a.ndjson").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = []
    for name in ("a.jsonl", "a.json", "b.json", "a.ndjson", "a.jsonl.gz"):
        asked: DataRequest = request(
            tmp_path, tmp_path / name, tokenizer=place, sequence_tokens=256, vocab=VOCABULARY, evaluation_share=0.0
        )
        found.append(learned(open_example_data(asked)))
    assert found[0] and all(each == found[0] for each in found)


def test_parquet_and_arrow(tmp_path: Path) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow", reason="pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": chat} for chat in CHATS]
    place = str(tokenizer(tmp_path / "tokenizer"))
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet")
    for name, writer in (("a.arrow", pyarrow.ipc.new_stream), ("b.arrow", pyarrow.ipc.new_file)):
        with writer(str(tmp_path / name), table.schema) as opened_file:
            opened_file.write_table(table)
    json_lines(tmp_path / "a.jsonl", rows)
    found = []
    for name in ("a.jsonl", "a.parquet", "a.arrow", "b.arrow"):
        asked = request(
            tmp_path, tmp_path / name, tokenizer=place, sequence_tokens=256, vocab=VOCABULARY, evaluation_share=0.0
        )
        found.append(learned(open_example_data(asked)))
    assert all(each == found[0] for each in found)


def test_plain_text_beside_rows_is_left_out_and_told(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    text_file(folder / "README.md", "# a set\n")
    json_lines(folder / "data.jsonl", [{"messages": chat} for chat in CHATS])
    place = tokenizer(tmp_path / "tokenizer")
    data = open_example_data(
        request(tmp_path, folder, tokenizer=str(place), sequence_tokens=256, vocab=VOCABULARY, evaluation_share=0.0)
    )
    assert data.examples == 3 and any("README.md: plain text is left out" in note for note in data.notes)


def test_conversations_need_a_template(tmp_path: Path) -> None:
    rows = json_lines(tmp_path / "rows.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(FlopwiseError, match="bytes has no chat template"):
        check_data(TrainRequest(data=(str(rows),)))
    without = tokenizer(tmp_path / "bare", None)
    with pytest.raises(FlopwiseError, match="has no chat template"):
        check_data(TrainRequest(data=(str(rows),), tokenizer=str(without)))
    check_data(TrainRequest(data=(str(rows),), tokenizer=str(tokenizer(tmp_path / "good"))))


# -- several sources --------------------------------------------------------------------------------------------------


def test_sources_are_seen_as_often_as_they_say(tmp_path: Path) -> None:
    first = json_lines(tmp_path / "a.jsonl", [{"input_ids": [1, number]} for number in range(40)])
    second = json_lines(tmp_path / "b.jsonl", [{"input_ids": [2, number]} for number in range(40)])
    place = str(tokenizer(tmp_path / "tokenizer"))
    asked = request(tmp_path, tokenizer=place, sequence_tokens=8, vocab=VOCABULARY, evaluation_share=0.0)
    data = open_example_data(replace(asked, sources=(f"{first}:2", f"{second}:0.5")))
    seen = [ids[0] for ids, _ in learned(data)]
    assert (seen.count(1), seen.count(2)) == (80, 20)
    plain = open_example_data(replace(asked, sources=(str(first), str(second))))
    assert plain.describe()["cache"] == data.describe()["cache"]
    assert plain.describe()["fingerprint"] != data.describe()["fingerprint"]


def test_text_is_seen_as_often_as_it_says(tmp_path: Path) -> None:
    first, second = text_file(tmp_path / "a.txt", "a" * 399), text_file(tmp_path / "b.txt", "b" * 401)
    asked = request(tmp_path, sequence_tokens=8, vocab=257, evaluation_share=0.0)
    data = open_language_data(replace(asked, sources=(f"{first}:3", f"{second}:0.25")))
    seen = [chr(row[0]) for row in data.batch(0, data.count).ids]
    assert (seen.count("a"), seen.count("b")) == (150, 12)
    with pytest.raises(FlopwiseError, match="is seen 0 times"):
        open_language_data(replace(asked, sources=(f"{first}:0",)))
    # A file may be called so.
    odd = text_file(tmp_path / "c:2", "c" * 99)
    assert open_language_data(replace(asked, sources=(str(odd),))).count == 12


# -- rows as they lie on the hub ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        (("instruction", "input", "output", "text"), "instruction"),
        (("id", "messages", "text"), "messages"),
        (("text", "input_ids"), "text"),
        (("input_ids", "attention_mask"), "tokens"),
        (("text", "prompt"), "text"),
    ],
)
def test_what_is_learned_of_a_row_goes_before_its_text(columns: tuple[str, ...], kind: str) -> None:
    assert kind_of(columns, "text", named=False) == kind
    assert kind_of(columns, "other", named=True) == "text"


def test_a_text_beside_a_conversation_is_told(tmp_path: Path) -> None:
    data = opened(tmp_path, [{"messages": CHATS[0], "text": None}] * 3)
    assert "rows.jsonl: messages are read, not text beside them" in data.notes


def test_contents_in_parts_and_calls_written_as_texts() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]}
    function = {"name": "add", "arguments": '{"a": [2, 2]}'}
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    row = read_row("messages", {"messages": [asked, called]}, has_template=True)
    assert isinstance(row, Conversation)
    assert row.messages[0]["content"] == "2 + 2?"
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": [2, 2]}}
    shown = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    with pytest.raises(ValueError, match="a part that is no text, 'image'"):
        read_row("messages", {"messages": [shown]}, has_template=True)
