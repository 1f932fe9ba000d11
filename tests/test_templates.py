"""Chat templates of every temper: marked, rewriting, refusing, with tools; and what is trained under each."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures_data import F4, conversation, text_of, write_byte_tokenizer, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.config import RunConfig
from hotlap.config_data import DataConfig
from hotlap.data.packed import Packing, folder_of
from hotlap.data.prepare import Places, prepare
from hotlap.data.readers import BadRow, Example, Message
from hotlap.data.render import Rendered, Renderer, mark_span
from hotlap.errors import BadData, MissingArtifact

MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<turn_end>' }}{% endgeneration %}{% else %}{{ m['content'] + '<turn_end>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""F4 with marks around what is trained."""

THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}"
    "{% set answer = m['content'].split('</think>')[-1].lstrip('\\n') %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\\n') "
    "if '</think>' in m['content'] else '' %}"
    "{{ '<assistant>' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' + answer }}"
    "{% else %}{{ answer }}{% endif %}{{ '<turn_end>\\n' }}"
    "{% else %}{{ '<' + m['role'] + '>' + m['content'] + '<turn_end>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""Thoughts of the answers after the last question only, and empty ones where there were none, as reasoning models'
templates have it."""

TOOLS = (
    "{% if tools %}{{ '<system>' + (tools | tojson) + '<turn_end>' }}{% endif %}"
    "{% for m in messages %}{{ '<' + ('user' if m['role'] == 'tool' else m['role']) + '>' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ '{' + call.function.name + (call.function.arguments | tojson) + '}' }}"
    "{% endfor %}{{ '<turn_end>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def renderer(tmp_path: Path, chat_template: str, **data: Any) -> Renderer:
    folder = write_byte_tokenizer(tmp_path / "t", chat_template)
    return Renderer(folder, DataConfig(**data))


def example(*turns: str, line: int = 1) -> Example:
    messages = conversation(*turns)["messages"]
    return Example(tuple(Message(m["role"], m["content"]) for m in messages), line)


def trained(rendered: Rendered) -> str:
    return text_of(rendered.tokens_L[rendered.is_trained_L])


def pack(source: Path, tokenizer: Path, said: list[str], **data: Any) -> Packing:
    config = RunConfig.model_validate({"base_model": "m", "dataset": "d", "data": data})
    template = Path(data["chat_template"]) if "chat_template" in data else None
    return prepare(config, 1, Places(source, chat_template=template), tokenizer, said.append)


# --- marks ---


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.tuples(st.text("ab <>\n"), st.text("cd é😀\n.", min_size=1)), min_size=1, max_size=4),
    has_system=st.booleans(),
)
def test_b23_the_mask_is_the_marked_template_s_own(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str]], has_system: bool
) -> None:
    marked = renderer(tmp_path_factory.getbasetemp() / "marked", MARKED)
    messages = [Message("system", "s")] if has_system else []
    for question, answer in turns:
        messages += [Message("user", question), Message("assistant", answer)]
    (ours,) = marked.render([Example(tuple(messages), 1)])
    chat = [{"role": m.role, "content": m.content} for m in messages]
    theirs = marked._tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    assert ours.tokens_L.tolist() == theirs["input_ids"]
    assert ours.is_trained_L.tolist() == [bool(flag) for flag in theirs["assistant_masks"]]
    bare = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    unmarked = renderer(tmp_path_factory.getbasetemp() / "unmarked", bare)
    (same,) = unmarked.render([Example(tuple(messages), 1)])
    assert same.is_trained_L.tolist() == ours.is_trained_L.tolist()


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1), cut=st.data())
def test_a_span_s_tokens_are_those_that_hold_its_characters(
    tmp_path_factory: pytest.TempPathFactory, text: str, cut: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "spans"
    backend = Renderer(write_byte_tokenizer(folder))._backend
    first = cut.draw(st.integers(0, len(text)))
    stop = cut.draw(st.integers(first, len(text)))
    encoding = backend.encode(text, add_special_tokens=False)
    marked = np.zeros(len(encoding.ids), dtype=np.bool_)
    mark_span(encoding, first, stop, marked)
    assert marked.tolist() == [start < stop and end > first and first < stop for start, end in encoding.offsets]


# --- templates that rewrite ---


def test_a_rewriting_template_trains_every_answer_as_it_is_written_when_it_is_the_last(tmp_path: Path) -> None:
    thinking = renderer(tmp_path, THINKING)
    row = example(
        "system: S",
        "user: q",
        "assistant: <think>\nhm\n</think>\n\na",
        "user: r",
        "assistant: b",
        "user: s",
        "assistant: c",
    )
    first, second, whole = thinking.render([row])
    head = "<system>S<turn_end>\n<user>q<turn_end>\n<assistant>"
    assert text_of(first.tokens_L) == head + "<think>\nhm\n</think>\n\na<turn_end>"
    assert trained(first) == "<think>\nhm\n</think>\n\na<turn_end>"
    assert text_of(second.tokens_L).startswith(head + "a<turn_end>\n<user>r")
    assert trained(second) == "<think>\n\n</think>\n\nb<turn_end>"
    assert trained(whole) == "<think>\n\n</think>\n\nc<turn_end>"
    for piece, num_messages in ((first, 2), (second, 4), (whole, 6)):
        prompt = thinking.encode_prompt(row.messages[:num_messages])
        assert piece.tokens_L.tolist()[: len(prompt)] == prompt  # as the model will be asked
        assert not piece.is_trained_L[: len(prompt)].any() and piece.is_trained_L[len(prompt) :].sum() > 3
    chat = [{"role": m.role, "content": m.content} for m in row.messages]
    naive = thinking._tokenizer.apply_chat_template(chat, tokenize=False)
    assert "hm" not in naive  # one text, masked by markers: the thought is never trained, the answers without one are


def test_what_was_rewritten_is_told_and_a_conversation_stays_together(tmp_path: Path) -> None:
    tokenizer = write_byte_tokenizer(tmp_path / "t", THINKING)
    rows = [conversation(f"user: q{i}", f"assistant: a{i}", f"user: r{i}", f"assistant: b{i}") for i in range(20)]
    rows += [conversation("user: q", "assistant: only")]
    said: list[str] = []
    both = pack(write_jsonl(tmp_path / "x.jsonl", rows), tokenizer, said, eval_examples=5, seq_len=256)
    assert any("20 conversations became several examples" in text for text in said)
    assert both.held_out is not None
    assert both.train.num_examples + both.held_out.num_examples == 41
    numbers = [
        {text_of(tokens).partition("<user>")[2].partition("<")[0] for tokens, _ in part.examples()}
        for part in (both.train, both.held_out)
    ]
    assert not numbers[0] & numbers[1] and len(numbers[1]) == 5


def test_only_the_last_answer_is_a_setting(tmp_path: Path) -> None:
    row = example("user: q", "assistant: a", "user: r", "assistant: b", "user: s")
    assert [trained(piece) for piece in renderer(tmp_path, F4, turns="last").render([row])] == ["b<turn_end>"]
    assert [trained(piece) for piece in renderer(tmp_path, F4).render([row])] == ["a<turn_end>b<turn_end>"]
    (last,) = renderer(tmp_path / "x", THINKING, turns="last").render([row])
    assert trained(last) == "<think>\n\n</think>\n\nb<turn_end>"


def test_a_template_that_asks_otherwise_than_it_writes_is_refused(tmp_path: Path) -> None:
    forced = F4.replace("{{ '<assistant>' }}", "{{ '<assistant><think>' }}")
    with pytest.raises(BadData, match=r"Line 17: .*message 2 differently.*data\.chat_template"):
        renderer(tmp_path, forced).render([example("user: q", "assistant: a", line=17)])


def test_answers_of_weight_0_are_not_trained(tmp_path: Path) -> None:
    row = example("user: q", "assistant: a", "user: r", "assistant: b")
    quiet = replace(row.messages[1], is_trained=False)
    row = replace(row, messages=(row.messages[0], quiet, *row.messages[2:]))
    (rendered,) = renderer(tmp_path, F4).render([row])
    assert trained(rendered) == "b<turn_end>"
    assert not renderer(tmp_path, F4).render([replace(row, messages=(row.messages[0], quiet))])[0].is_trainable


# --- tools ---

CALL = {"name": "look", "arguments": {"at": "sky"}}
TOOL = {"type": "function", "function": {"name": "look", "description": "looks"}}
CALLING = Example(
    (
        Message("user", "q"),
        Message("assistant", "", (CALL,)),
        Message("tool", "blue"),
        Message("assistant", "It is blue."),
    ),
    line=9,
    tools=(TOOL,),
)


def test_tools_are_written_by_a_template_that_can(tmp_path: Path) -> None:
    (rendered,) = renderer(tmp_path, TOOLS).render([CALLING])
    text = text_of(rendered.tokens_L)
    assert text.startswith('<system>[{"type": "function", "function": {"name": "look"') and "<user>blue" in text
    assert trained(rendered) == '{look{"at": "sky"}}<turn_end>It is blue.<turn_end>'


def test_tools_that_a_template_leaves_out_are_never_lost_silently(tmp_path: Path) -> None:
    bare = renderer(tmp_path, F4)
    (tool,) = bare.render_each([CALLING])
    (call,) = bare.render_each([replace(CALLING, tools=())])
    assert isinstance(tool, BadRow) and "leaves out the tool 'look'" in tool.reason
    assert isinstance(call, BadRow) and "leaves out the call of 'look' in message 2" in call.reason
    assert 'data.tools = "text"' in call.reason
    chat = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}]
    assert "look" not in bare._tokenizer.apply_chat_template(chat, tokenize=False)  # the naive way trains on nothing


def test_tools_as_text_need_no_template_that_knows_them(tmp_path: Path) -> None:
    (rendered,) = renderer(tmp_path, F4, tools="text").render([CALLING])
    text = text_of(rendered.tokens_L)
    assert text.startswith("<system>You may call these tools:\n<tools>\n" + json.dumps(TOOL))
    assert "<user><tool_response>\nblue\n</tool_response><turn_end>" in text
    assert trained(rendered) == (
        f"<tool_call>\n{json.dumps(CALL)}\n</tool_call><turn_end>It is blue.<turn_end>"
    )  # fmt: skip


# --- templates from a file, and text without one ---


def test_a_template_from_a_file_takes_the_place_of_the_model_s(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "t", F4)
    mine = tmp_path / "mine.jinja"
    mine.write_text(F4.replace("<turn_end>", "<end>"), encoding="utf-8-sig")
    (rendered,) = Renderer(folder, chat_template=mine).render([example("user: q", "assistant: a")])
    assert text_of(rendered.tokens_L) == "<user>q<end><assistant>a<end>"
    bare = write_byte_tokenizer(tmp_path / "bare", None)
    assert trained(Renderer(bare, chat_template=mine).render([example("user: q", "assistant: a")])[0]) == "a<end>"
    with pytest.raises(MissingArtifact, match=r"nowhere\.jinja cannot be read"):
        Renderer(folder, chat_template=tmp_path / "nowhere.jinja")
    mine.write_text("{% for %}")
    with pytest.raises(BadData, match=r"The chat template of .*mine.jinja is broken"):
        Renderer(folder, chat_template=mine)


def test_b43_a_template_from_a_file_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    tokenizer = write_byte_tokenizer(tmp_path / "t", F4)
    source = write_jsonl(tmp_path / "x.jsonl", [conversation("user: q", "assistant: a")])
    mine = tmp_path / "mine.jinja"
    seen: set[str] = set()
    for template in (F4, F4.replace("<turn_end>", "<end>")):
        mine.write_text(template)
        seen.add(pack(source, tokenizer, [], chat_template=str(mine)).train.fingerprint)
    seen.add(pack(source, tokenizer, []).train.fingerprint)
    assert len(seen) == 3


@pytest.mark.parametrize("chat_template", [F4, None])
def test_plain_text_is_trained_whole_and_no_template_touches_it(tmp_path: Path, chat_template: str | None) -> None:
    folder = write_byte_tokenizer(tmp_path / "t", chat_template, adds_begin=True)
    text = Example((Message("assistant", "Once upon"),), 1, "text")
    (rendered,) = Renderer(folder).render([text])
    assert text_of(rendered.tokens_L) == "<begin>Once upon<end>" and trained(rendered) == "Once upon<end>"
    (open_ended,) = Renderer(folder, DataConfig(append_end=False)).render([text])
    assert text_of(open_ended.tokens_L) == "<begin>Once upon"


def test_b29_the_end_of_an_answer_can_be_left_off(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "t", None)
    row = Example((Message("user", "Q: 1+1?"), Message("assistant", " 2")), 1, "completion")
    assert trained(Renderer(folder).render([row])[0]) == " 2<end>"
    assert trained(Renderer(folder, DataConfig(append_end=False)).render([row])[0]) == " 2"


def test_b42_bad_rows_follow_the_policy_and_are_counted_and_listed(tmp_path: Path) -> None:
    tokenizer = write_byte_tokenizer(tmp_path / "t", F4)
    rows: list[dict[str, Any]] = [{"prompt": f"q{i}", "completion": "a"} for i in range(3)]
    rows += [{"prompt": "q", "completion": ""}, {"prompt": "q", "completion": ""}, {"prompt": "q"}]
    source = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(BadData) as caught:
        pack(source, tokenizer, [])
    message = str(caught.value)
    assert "3 of 6 rows" in message and 'data.bad_rows = "drop"' in message
    assert f"2 x 'completion' is empty, first {source} line 4" in message and "1 x 'completion' is missing" in message
    said: list[str] = []
    data = pack(source, tokenizer, said, bad_rows="drop").train
    assert data.num_examples == 3 and sum(entry.count for entry in data.facts.bad) == 3
    assert any("Dropped 2 of 6" in text and "x.jsonl lines 4, 5" in text for text in said)
    listed = [json.loads(line) for line in (folder_of(data.fingerprint) / "left_out.jsonl").read_text().splitlines()]
    assert [row["line"] for row in listed] == [4, 5, 6] and "Give it text" in listed[0]["reason"]
    with pytest.raises(BadData, match="3 of 6 rows"):  # what was packed for one policy is not used for the other
        pack(source, tokenizer, [])
    with pytest.raises(BadData, match=r"No train example .* 2 x 'completion' is empty"):
        pack(write_jsonl(tmp_path / "y.jsonl", rows[3:]), tokenizer, [], bad_rows="drop")
