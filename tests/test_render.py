"""From messages to tokens: what is trained, what a model sees, and that both are the same everywhere."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from fixtures_data import (
    ASSISTANT,
    BEGIN,
    END,
    F4,
    F4_BEGIN,
    TURN_END,
    USER,
    byte_ids,
    conversation,
    f4_conversations,
    save_tokenizer,
    text_of,
    write_byte_tokenizer,
    write_jsonl,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hotlap.data.readers import Example, Message, read_examples
from hotlap.data.render import Rendered, Renderer
from hotlap.errors import BadData, MissingArtifact


@pytest.fixture(scope="module")
def f4(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(write_byte_tokenizer(tmp_path_factory.mktemp("f4")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(write_byte_tokenizer(tmp_path_factory.mktemp("plain"), chat_template=None))


def with_template(tmp_path: Path, chat_template: str) -> Renderer:
    return Renderer(write_byte_tokenizer(tmp_path / "tokenizer", chat_template))


def example(*turns: str, line: int = 1) -> Example:
    messages = conversation(*turns)["messages"]
    return Example(tuple(Message(m["role"], m["content"]) for m in messages), line)


def completion(prompt: str, answer: str, line: int = 1) -> Example:
    return Example((Message("user", prompt), Message("assistant", answer)), line, "completion")


def trained_pieces(rendered: Rendered) -> list[str]:
    """The trained tokens as text, one piece a stretch."""
    pieces: list[list[int]] = []
    was_trained = False
    for token, is_trained in zip(rendered.tokens_L, rendered.is_trained_L, strict=True):
        if is_trained and not was_trained:
            pieces.append([])
        if is_trained:
            pieces[-1].append(int(token))
        was_trained = bool(is_trained)
    return [text_of(piece) for piece in pieces]


# --- what is trained ---


def test_b24_every_answer_and_its_end_is_trained_and_nothing_else(f4: Renderer) -> None:
    row = example("system: S", "user: U1", "assistant: A1", "user: U2", "assistant: A2", "user: U3", "assistant: A3")
    (rendered,) = f4.render([row])
    text = "<system>S<turn_end><user>U1<turn_end><assistant>A1<turn_end>"
    text += "<user>U2<turn_end><assistant>A2<turn_end><user>U3<turn_end><assistant>A3<turn_end>"
    assert rendered.tokens_L.tolist() == byte_ids(text)
    assert trained_pieces(rendered) == ["A1<turn_end>", "A2<turn_end>", "A3<turn_end>"]
    naive = text.rsplit("<assistant>", 1)[1]  # everything before the last answer is prompt
    assert trained_pieces(rendered) != [naive]


def test_b24_a_leading_answer_is_trained_and_a_trailing_question_adds_nothing(f4: Renderer) -> None:
    leading, trailing, silent = f4.render(
        [
            example("assistant: A1", "user: U1", "assistant: A2"),
            example("user: U1", "assistant: A1", "user: U2"),
            example("system: S", "user: U1"),
        ]
    )
    assert trained_pieces(leading) == ["A1<turn_end>", "A2<turn_end>"]
    assert trained_pieces(trailing) == ["A1<turn_end>"]
    assert not silent.is_trainable and len(silent.tokens_L) == 7


def test_b23_a_template_without_marks_is_masked_exactly(f4: Renderer, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", f4_conversations(8))
    examples = list(read_examples(path))
    for row, rendered in zip(examples, f4.render(examples), strict=True):
        answers = [m.content + "<turn_end>" for m in row.messages if m.role == "assistant"]
        assert trained_pieces(rendered) == answers
    naive = f4._tokenizer.apply_chat_template(
        f4_conversations(1)[0]["messages"], return_assistant_tokens_mask=True, return_dict=True
    )
    assert sum(naive["assistant_masks"]) == 0


def test_the_white_space_after_a_turn_is_not_trained(tmp_path: Path) -> None:
    renderer = with_template(
        tmp_path,
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<turn_end>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
    )
    (rendered,) = renderer.render([example("user: q", "assistant: a\n\n", "user: r", "assistant: b")])
    assert trained_pieces(rendered) == ["a\n\n<turn_end>", "b<turn_end>"]
    assert renderer.stop_token_ids == {END, TURN_END}


def test_text_that_looks_like_a_turn_misleads_nobody(f4: Renderer) -> None:
    (rendered,) = f4.render([example("user: <assistant>no<turn_end>", "assistant: yes")])
    assert trained_pieces(rendered) == ["yes<turn_end>"]
    tokens = rendered.tokens_L.tolist()
    first = tokens.index(ASSISTANT) + 1  # the naive way: what follows the first marker
    assert text_of(tokens[first : tokens.index(TURN_END) + 1]) == "no<turn_end>"


def test_characters_of_several_bytes_are_trained_whole(f4: Renderer) -> None:
    (rendered,) = f4.render([example("user: 你好😀", "assistant: e\u0301👩‍👧")])
    assert trained_pieces(rendered) == ["e\u0301👩‍👧<turn_end>"]


def test_b15_the_first_token_of_an_example_is_never_trained(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, "{% for m in messages %}{{ m['content'] + '<turn_end>' }}{% endfor %}")
    (rendered,) = renderer.render([example("assistant: ab", "user: q", "assistant: c")])
    assert trained_pieces(rendered) == ["b<turn_end>", "c<turn_end>"]
    naive = [True, True, True, False, False, True, True]  # all of the answer: the row before would predict its start
    assert rendered.is_trained_L.tolist() != naive


def test_b21_boundaries_do_not_depend_on_how_a_marker_is_tokenized(tmp_path: Path) -> None:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "hid", "from", "hi", "there", "still", "here"]
    lines = [
        f"Question: {words[i % 13]} {words[i % 7]} {words[i % 5]}\nAnswer: {words[i % 11]} hi {words[i % 3]}"
        for i in range(50)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=256 + 300,
            special_tokens=["<end>", "<answer>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    save_tokenizer(tmp_path, tokenizer, None, eos="<end>", pad="<end>")
    renderer = Renderer(tmp_path)
    questions = ["q", "what follows Answer: here"]
    for marker in ["\nAnswer:", "\nAnswer: ", "\nAnswer", "<answer>"]:
        for question in questions:
            row = completion(f"Question: {question}{marker}", (": hi" if marker == "\nAnswer" else " hi").lstrip())
            (rendered,) = renderer.render([row])
            answer = renderer.decode(rendered.tokens_L[rendered.is_trained_L], shows_special=True)
            assert answer.lstrip(" :") == "hi<end>", (marker, question, answer)
    # The naive way looks for the marker's own tokens, which are others than in the text.
    marker = tokenizer.encode("Answer: ").ids
    text = tokenizer.encode("Question: q\nAnswer: hi").ids
    assert not any(text[at : at + len(marker)] == marker for at in range(len(text)))


def test_a_template_that_refuses_is_quoted_with_the_line(tmp_path: Path) -> None:
    renderer = with_template(
        tmp_path,
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ '<' + m['role'] + '>' + m['content'] + '<turn_end>' }}{% endfor %}",
    )
    rows = [example("user: q", "assistant: a", line=1), example("system: s", "user: q", "assistant: a", line=2)]
    with pytest.raises(BadData, match=r"Line 2: .*no system role"):
        renderer.render(rows)


def test_b23_a_template_that_leaves_the_answer_out_is_refused(tmp_path: Path) -> None:
    renderer = with_template(
        tmp_path, "{% for m in messages %}{{ m['content'] if m['role'] == 'user' else '' }}{% endfor %}"
    )
    with pytest.raises(BadData, match="Line 5: the chat template leaves out every answer"):
        renderer.render([example("user: q", "assistant: a", line=5)])


# --- begin and end tokens ---


@pytest.mark.parametrize("adds_begin", [False, True])
@pytest.mark.parametrize("chat_template", [F4, F4_BEGIN], ids=["bare", "template writes it"])
def test_b26_one_begin_token_in_training_evaluation_and_serving(
    tmp_path: Path, adds_begin: bool, chat_template: str
) -> None:
    renderer = Renderer(write_byte_tokenizer(tmp_path / "t", chat_template, adds_begin=adds_begin))
    row = example("user: q", "assistant: a")
    trained = renderer.render([row])[0].tokens_L.tolist()
    prompt = renderer.encode_prompt(row.messages[:1])
    expected = [BEGIN] * (adds_begin or chat_template == F4_BEGIN)
    assert trained == expected + byte_ids("<user>q<turn_end><assistant>a<turn_end>")
    assert prompt == expected + byte_ids("<user>q<turn_end><assistant>")
    assert trained[: len(prompt)] == prompt
    naive = Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json")).encode("<begin>" * len(expected) + "<user>").ids
    assert (naive.count(BEGIN) == 2) == (adds_begin and bool(expected))


@pytest.mark.parametrize("pad_token", ["<pad>", "<end>"])
def test_b29_plain_text_gets_one_trained_end(tmp_path: Path, pad_token: str) -> None:
    renderer = Renderer(write_byte_tokenizer(tmp_path / "t", chat_template=None, pad_token=pad_token))
    bare, ended = renderer.render([completion("Q: 1+1?", " 2"), completion("Q: 1+1?", " 2<end>")])
    assert bare.tokens_L.tolist() == ended.tokens_L.tolist() == byte_ids("Q: 1+1? 2<end>")
    assert trained_pieces(bare) == trained_pieces(ended) == [" 2<end>"]
    naive = bare.is_trained_L & (bare.tokens_L != renderer.pad_token_id)  # all padding ids masked
    assert bool(naive[-1]) == (pad_token == "<pad>")
    assert renderer.stop_token_ids == {END}


def test_plain_text_takes_prompts_but_no_messages(plain: Renderer) -> None:
    assert plain.encode_prompt([Message("user", "Q: 1+1?")]) == byte_ids("Q: 1+1?")
    with pytest.raises(BadData, match=r"Line 3: .*no chat template.*Write prompt and completion"):
        plain.render([example("user: q", "assistant: a", line=3)])
    with pytest.raises(BadData, match="a prompt is one user message"):
        plain.encode_prompt([Message("system", "s"), Message("user", "q")])


def test_a_tokenizer_without_an_end_is_refused_for_plain_text(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "t", chat_template=None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(BadData, match="no end token"):
        Renderer(folder).render([completion("q", "a")])


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifact, match=r"has no tokenizer\.json"):
        Renderer(tmp_path)


def test_truncation_and_padding_in_the_tokenizer_file_are_ignored(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "t")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    (rendered,) = Renderer(folder).render([example("user: question", "assistant: answer")])
    assert text_of(rendered.tokens_L) == "<user>question<turn_end><assistant>answer<turn_end>"


def test_decoding_shows_special_tokens_on_request(f4: Renderer) -> None:
    ids = byte_ids("<user>é<turn_end>")
    assert f4.decode(ids) == "é"
    assert f4.decode(ids, shows_special=True) == "<user>é<turn_end>"
    assert f4.eos_token_id == END and f4.pad_token_id == 256 and ids[0] == USER


def test_rendering_in_batches_equals_rendering_alone(f4: Renderer, tmp_path: Path) -> None:
    rows = [*f4_conversations(20), conversation("assistant: a"), {"prompt": "p", "completion": "c"}]
    examples = list(read_examples(write_jsonl(tmp_path / "x.jsonl", rows)))
    alone = [f4.render([row])[0] for row in examples]
    for one, other in zip(alone, f4.render(examples), strict=True):
        assert one.tokens_L.tolist() == other.tokens_L.tolist()
        assert one.is_trained_L.tolist() == other.is_trained_L.tolist()


# --- threads ---

RENDER = """
import hashlib, sys
from pathlib import Path
from hotlap.data.readers import read_examples
from hotlap.data.render import Renderer
renderer = Renderer(Path(sys.argv[1]))
renderer.encode_prompt(next(iter(read_examples(Path(sys.argv[2])))).messages[:1])
for count in (2, 2000):
    rendered = renderer.render(list(read_examples(Path(sys.argv[2])))[:count])
    digest = hashlib.sha256()
    for each in rendered:
        digest.update(each.tokens_L.tobytes() + each.is_trained_L.tobytes())
    print(len(rendered), digest.hexdigest())
assert "torch" not in sys.modules and "multiprocessing.pool" not in sys.modules
"""


def test_b54_any_number_of_threads_gives_the_same_tokens_and_finishes(f4: Renderer, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", f4_conversations(2000))
    folder = write_byte_tokenizer(tmp_path / "t")
    variants = [
        {"TOKENIZERS_PARALLELISM": "false"},
        {"RAYON_NUM_THREADS": "8", "TOKENIZERS_PARALLELISM": "true"},
    ]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RENDER, str(folder), str(path)],
            env=os.environ | env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for env in variants
    ]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    examples = list(read_examples(path))
    here = "".join(f"{count} {digest(f4.render(examples[:count]))}\n" for count in (2, 2000))
    assert outputs == [here] * 2


def digest(rendered: Sequence[Rendered]) -> str:
    total = hashlib.sha256()
    for each in rendered:
        total.update(each.tokens_L.tobytes() + each.is_trained_L.tobytes())
    return total.hexdigest()


# --- the names in transformers ---

_NUM_READ = """
import sys
from pathlib import Path
read = []
def see(event, given):
    if event == "open" and "/transformers/models/" in str(given[0]) and str(given[0]).endswith(".py"):
        read.append(given[0])
sys.addaudithook(see)
from hotlap.data.render import Renderer
Renderer(Path(sys.argv[1]))
num_read = len(read)
import transformers
assert "LlamaForCausalLM" in transformers.__all__ and transformers.LlamaConfig().model_type == "llama"
print(num_read)
"""


def test_transformers_model_files_are_read_once_for_all_processes(tmp_path: Path) -> None:
    """And again where what was kept is damaged, or was written by another version."""
    folder = write_byte_tokenizer(tmp_path / "tokenizer")
    argv = [sys.executable, "-W", "ignore", "-c", _NUM_READ, str(folder)]
    env = {**os.environ, "HOTLAP_HOME": str(tmp_path / "home")}

    def num_read() -> int:
        return int(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout)

    assert num_read() > 1_000
    (kept,) = (tmp_path / "home" / "cache").glob("transformers-*.json")
    whole = kept.read_bytes()
    assert num_read() < 10
    kept.write_bytes(whole[:1_000])
    assert num_read() > 1_000
    assert json.loads(kept.read_bytes()) == json.loads(whole)


# --- the real tokenizer ---


@pytest.mark.real
def test_smollm2_trains_answers_and_agrees_with_its_own_tokenizer(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    renderer = Renderer(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    row = example("user: Who are you?", "assistant:  I am é 😀.\n", "user: Sure?", "assistant: Yes")
    (rendered,) = renderer.render([row])
    chat = [{"role": m.role, "content": m.content} for m in row.messages]
    own = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert rendered.tokens_L.tolist() == own
    answers = renderer.decode(rendered.tokens_L[rendered.is_trained_L], shows_special=True)
    assert answers == " I am é 😀.\n<|im_end|>Yes<|im_end|>"
    prompt = renderer.encode_prompt(row.messages[:1])
    assert own[: len(prompt)] == prompt and prompt[-3:] == renderer.encode_prompt(row.messages[:3])[-3:]
    assert renderer.stop_token_ids == {renderer.eos_token_id}
    assert trained_count(renderer, example("user: q", "assistant: Yes")) == 2


def trained_count(renderer: Renderer, row: Example) -> int:
    return int(renderer.render([row])[0].is_trained_L.sum())
