"""Templates that are asked once a shape write what they write when asked for every conversation."""

from collections.abc import Sequence
from typing import Any

import pytest
from fixtures_data import F4, F4_BEGIN
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hotlap.config_data import DataConfig
from hotlap.data.examples import BadRow, Example, Message
from hotlap.data.turns import ChatTemplate, Text
from hotlap.data.verbatim import copies_contents

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ZEPHYR = """
{% for m in messages %}
{% if m.role == 'user' %}
{{ '<|user|>\\n' ~ m.content ~ eos_token }}
{% elif m.role == 'system' %}
{{ '<|system|>\\n' + m['content'] }}
{% else %}
{{ '<|assistant|>\\n' + (m['content'] if m['content'] else 'nothing') + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
PICKY = """
{%- if messages[0].role == 'system' %}{{- messages[0].content or 'no system' }}{% endif %}
{%- for turn in messages[1:] %}
    {%- if (turn.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles: ' + turn.role) }}{% endif %}
    {%- if messages | length > 4 and loop.last %}{% break %}{% endif %}
    {{- '[' ~ loop.index ~ '/' ~ loop.length ~ '] ' ~ turn.content }}{{ turn.tool_calls }}
{%- endfor %}
"""
PROVEN = {"f4": F4, "begin": F4_BEGIN, "chatml": CHATML, "zephyr": ZEPHYR, "picky": PICKY}

LOOP = "{% for m in messages %}{% endfor %}"
NOT_PROVEN = [
    "{{ m.content | trim }}",
    "{{ m['content'].strip() }}",
    "{{ m.content[0] }}",
    "{{ m.content * 2 }}",
    "{% if 'a' in m.content %}x{% endif %}",
    "{% if m.content == 'a' %}x{% endif %}",
    "{{ m.content | length }}",
    "{% set x = m.content %}{{ x | upper }}",
    "{% set x = m %}{{ x.content }}",
    "{% set m = x %}",
    "{{ m }}",
    "{{ m | tojson }}",
    "{{ m.items() }}",
    "{{ m.get('content') }}",
    "{{ m['con' + 'tent'] | upper }}",
    "{% set k = 'content' %}{{ m[k] | upper }}",
    "{% for k in m %}{{ m[k] }}{% endfor %}",
    "{{ m.values() }}",
    "{% set ns = namespace(x='') %}{% set ns.x = m.content %}{{ ns.x | upper }}",
    "{{ [m.content] | join }}",
    "{% filter upper %}{{ m.content }}{% endfilter %}",
    "{% set x %}{{ m.content }}{% endset %}{{ x | upper }}",
    "{{ loop.previtem }}",
    "{{ loop.changed(m) }}",
    "{{ loop.changed(m.content) }}",
    "{{ raise_exception(m.content) }}",
    "{% macro w() %}{{ m.content }}{% endmacro %}{{ w() | upper }}",
    "{{ strftime_now('%d') }}",
    "{{ (m.content ~ 'x') | upper }}",
    "{% with x = m %}{{ x.content | upper }}{% endwith %}",
    "{{ messages | tojson }}",
    "{{ (messages | first).content }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages[0] }}",
    "{{ messages.pop() }}",
    "{{ messages[0][k] }}",
    "{% generation %}{{ m.content }}{% endgeneration %}",
    "{{ '\\ue000' }}",
    "{% call w(m) %}{% endcall %}",
    "{{ unclosed",
    "{% for a in messages if a.content == 'x' %}{% endfor %}",
    "{% for a, b in messages %}{{ a }}{% endfor %}",
    "{{ (m.content, 1)[0] | upper }}",
    "{{ {'a': m.content} }}",
    "{{ 'x' if m.content | length > 3 }}",
]


def template(text: str, is_asked_always: bool = False) -> ChatTemplate:
    from tokenizers import Tokenizer, models

    specials = {"eos_token": "</s>", "pad_token": "<pad>"}
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **specials)
    tokenizer.chat_template = text
    made = ChatTemplate(tokenizer, DataConfig())
    if is_asked_always:
        made._skeletons = None
    return made


BOTH = {name: (template(text), template(text, is_asked_always=True)) for name, text in PROVEN.items()}

CONTENT = st.text("a{}%'<|/\\\n \ue000\ue0010é") | st.sampled_from(["", "{{ m }}", "<|im_end|>", "\ue0000\ue001"])
MESSAGE = st.builds(Message, st.sampled_from(["system", "user", "assistant"]), CONTENT)
CHAT = st.lists(MESSAGE, min_size=1, max_size=5) | st.lists(CONTENT, min_size=2, max_size=6).map(
    lambda texts: [Message("assistant" if at % 2 else "user", text) for at, text in enumerate(texts)]
)


def examples(chats: Sequence[Sequence[Message]]) -> list[Example]:
    return [Example(tuple(chat), line=at) for at, chat in enumerate(chats)]


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(PROVEN)), chats=st.lists(CHAT, min_size=1, max_size=4))
def test_a_proven_template_by_shape_is_the_template(name: str, chats: list[list[Message]]) -> None:
    by_shape, asked = BOTH[name]
    assert by_shape._skeletons is not None
    found: list[list[Text] | BadRow] = by_shape.texts(examples(chats))
    assert found == asked.texts(examples(chats))


def test_a_shape_is_asked_once_and_what_has_more_than_contents_always(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = template(CHATML), list[Any]()
    apply = made._apply

    def counted(chats: Any, tools: Any, is_prompt: bool) -> Any:
        asked.extend(chats)
        return apply(chats, tools, is_prompt)

    monkeypatch.setattr(made, "_apply", counted)
    chats = [[Message("user", f"q{at}"), Message("assistant", f"a{at}")] for at in range(50)]
    made.texts(examples(chats))
    assert len(asked) == 2  # up to the answer, and with it
    named = [[Message("user", "q", name="n"), Message("assistant", "a", reasoning="r")]]
    made.texts(examples(named))
    assert [message.get("name") for chat in asked[2:] for message in chat if message["role"] == "user"] == ["n", "n"]


@pytest.mark.parametrize("text", NOT_PROVEN)
def test_what_may_change_a_content_is_not_proven(text: str) -> None:
    inside = LOOP.replace("{% endfor %}", text + "{% endfor %}")
    assert copies_contents(LOOP.replace("{% endfor %}", "{{ m.content }}{% endfor %}"))
    assert not copies_contents(inside)
