"""Kernels in place of a mask: the same losses and gradients, and none that lets examples of a row see each other.

No CUDA device is here, so in FlashAttention's place attention functions are registered with transformers that compute
on a processor what the kernel promises: from what they are handed, and from that alone.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import make_family
from fixtures_data import f4_conversations, write_byte_tokenizer, write_jsonl
from tiny import tiny_config

from hotlap.config import LoraConfig, RunConfig
from hotlap.data.packed import PackedDataset
from hotlap.data.prepare import Places, prepare
from hotlap.errors import ConfigError

pytestmark = pytest.mark.torch

WINDOW = 7


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def adapted(folder: Path) -> Any:
    import torch

    from hotlap.train import model

    adapted = model.attach_lora(model.load_base(folder), LoraConfig(rank=4, alpha=8.0), 0, "tiny", neftune_alpha=5.0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return adapted


@pytest.fixture(scope="module", params=["everywhere", "within a window"])
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "everywhere":
        return tiny_model
    from transformers import MistralConfig, MistralForCausalLM

    folder = tmp_path_factory.mktemp("mistral")
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
    MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=WINDOW)).save_pretrained(folder)
    return folder


def loops(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> tuple[Any, None]:
    """What flash_attn_varlen_func promises, example by example."""
    import torch
    import torch.nn.functional as F

    assert mask is None and query.shape[0] == 1 and given["deterministic"] is True
    ends = given["cu_seq_lens_q"].tolist()
    assert given["cu_seq_lens_k"].tolist() == ends and ends[0] == 0 and ends[-1] == query.shape[2]
    assert given["cu_seq_lens_q"].dtype == torch.int32
    assert given["max_length_q"] == given["max_length_k"] == max(np.diff(ends))
    found = []
    for first, stop in pairwise(ends):
        part = slice(first, stop)
        sees = torch.ones(stop - first, stop - first, dtype=torch.bool).tril()
        if given.get("sliding_window") is not None:
            sees = sees.triu(1 - given["sliding_window"])
        q, k, v = (states[:, :, part] for states in (query, key, value))
        found.append(F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=given["scaling"]))
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def one_row(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> tuple[Any, None]:
    """A kernel that does not care where examples begin."""
    import torch.nn.functional as F

    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous(), None


def register(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """In FlashAttention's place, which transformers would look for."""
    from transformers import AttentionInterface

    from hotlap.train import attention

    AttentionInterface.register(function.__name__, function)
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "flash", function.__name__)


def packed(tmp_path: Path) -> PackedDataset:
    tree = {"base_model": "m", "dataset": "d", "data": {"seq_len": 96}}
    source = write_jsonl(tmp_path / "x.jsonl", f4_conversations(12))
    config = RunConfig.model_validate(tree)
    return prepare(config, 1, Places(source), write_byte_tokenizer(tmp_path / "t"), lambda text: None).train


def loss_of(adapted: Any, data: PackedDataset, is_open: bool = False) -> tuple[float, dict[str, Any]]:
    from hotlap.train.step import batch_loss, num_targets, read_batch

    adapted.peft_model.eval()
    for parameter in adapted.parameters.values():
        parameter.grad = None
    batch = read_batch(data, np.arange(data.num_rows))
    loss = batch_loss(adapted, batch, is_open) / num_targets(batch)
    loss.backward()
    return float(loss.detach()), {name: parameter.grad.clone() for name, parameter in adapted.parameters.items()}


def assert_same(one: tuple[float, dict[str, Any]], other: tuple[float, dict[str, Any]]) -> None:
    import torch

    assert one[0] == pytest.approx(other[0], abs=1e-5)
    for name, gradient in one[1].items():
        torch.testing.assert_close(other[1][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("kernel", ["flash", "examples", "examples, one after another"])
def test_b15_a_kernel_for_varying_lengths_gives_the_mask_s_loss_and_gradients(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    from hotlap.train import short

    ours, data = adapted(folder), packed(tmp_path)
    by_mask, is_open = loss_of(ours, data), loss_of(ours, data, is_open=True)
    assert (data.segments_NT == 0).any() and data.segments_NT.max() > 1  # rows with padding, of several examples
    if kernel == "flash":
        register(monkeypatch, loops)
    elif kernel != "examples":
        monkeypatch.setattr(short, "SHORT", 1)
        kernel = "examples"
    ours.use_kernel(kernel)
    assert_same(by_mask, loss_of(ours, data))
    assert_same(is_open, loss_of(ours, data, is_open=True))
    assert abs(by_mask[0] - is_open[0]) > 1e-4
    ours.peft_model.train()  # noise is made by the length of the example, and of the flat rows' shape
    assert np.isfinite(loss_in_this_mode(ours, data))


def test_the_last_token_of_an_example_is_not_computed_and_nothing_misses_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotlap.train import step

    ours, data = adapted(folder), packed(tmp_path)
    ours.use_kernel("examples")
    num_tokens, num_examples = int((data.segments_NT > 0).sum()), int(data.segments_NT.max(axis=1).sum())
    seen: list[int] = []
    embeddings = ours.peft_model.get_base_model().get_input_embeddings()
    embeddings.register_forward_hook(lambda _module, given, _output: seen.append(given[0].numel()))
    found, is_open = loss_of(ours, data), loss_of(ours, data, is_open=True)
    assert seen == [num_tokens - num_examples, num_tokens]
    monkeypatch.setattr(step, "_attended", lambda segments_BT, _is_open: segments_BT)
    assert_same(found, loss_of(ours, data))
    assert seen[2] == num_tokens and abs(found[0] - is_open[0]) > 1e-4


def test_laying_rows_flat_asks_the_device_for_nothing() -> None:
    """On a device whose tensors have no values to give."""
    import torch

    from hotlap.train.attention import flatten
    from hotlap.train.masks import positions_of

    segments_BT = torch.tensor([[1] * 5 + [2] * 6 + [0] * 2, [1] * 9 + [2] * 4], dtype=torch.int32)
    flat = flatten(segments_BT, positions_of(segments_BT), torch.device("meta"))
    tokens_BT = torch.empty(2, 13, dtype=torch.int64, device="meta")
    assert flat.gathered(tokens_BT).shape == (1, 24)
    assert flat.spread(torch.empty(1, 24, 8, device="meta")).shape == (2, 13, 8)
    arguments = flat.arguments_for("flash")
    assert arguments["max_length_q"] == 9 and arguments["cu_seq_lens_q"].shape == (5,)
    here = flatten(segments_BT, positions_of(segments_BT), torch.device("cpu"))
    assert here.ends_E.tolist() == [0, 5, 11, 20, 24]
    assert here.lengths_1N.tolist() == [[5] * 5 + [6] * 6 + [9] * 9 + [4] * 4]
    assert here.spread(here.gathered(segments_BT)[..., None].float())[..., 0].tolist() == segments_BT.tolist()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_short_examples_attend_together_as_they_would_alone(precision: str) -> None:
    """Of lengths that make several groups, with fewer keys than queries, and values of another width."""
    import torch
    import torch.nn.functional as F

    from hotlap.train import short

    lengths = [30, 5, 128, 1, 21, 31, 90, 7, 100]
    ends_E = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    groups = short.groups_of(ends_E)
    assert groups is not None
    padded = [(group.num_L, group.num_E) for group in groups]
    assert padded == [(128, 3), (31, 3), (7, 2), (1, 1)] and short.groups_of(ends_E) is groups
    draw, dtype = torch.Generator().manual_seed(0), getattr(torch, precision)
    num_N = int(ends_E[-1])
    query, key, value, outer = (
        torch.randn(1, heads, num_N, width, generator=draw).to(dtype)
        for heads, width in ((6, 16), (2, 16), (2, 24), (6, 24))
    )
    exact, found = ([each.to(to).requires_grad_() for each in (query, key, value)] for to in (torch.float64, dtype))
    alone = [
        F.scaled_dot_product_attention(*parts, is_causal=True, scale=0.3, enable_gqa=True)
        for parts in zip(*(each.split(lengths, dim=2) for each in exact), strict=True)
    ]
    expected = torch.cat(alone, dim=2).transpose(1, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):  # as in a step
        out = short.attend(found[0], found[1], found[2], groups, 0.3)
    assert out.dtype == dtype
    near = {"rtol": 1e-5, "atol": 1e-5} if precision == "float32" else {"rtol": 2**-8, "atol": 2**-10}
    torch.testing.assert_close(out.double(), expected, **near)
    expected.backward(outer.transpose(1, 2).double())
    out.backward(outer.transpose(1, 2))
    for one, other in zip(found, exact, strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.dtype == dtype
        torch.testing.assert_close(one.grad.double(), other.grad, **near)


@pytest.mark.parametrize(
    ("lengths", "given", "is_together"),
    [
        ([128, 3], {}, True),
        ([129, 3], {}, False),
        ([20, 3], {"sliding_window": 20}, True),
        ([20, 3], {"sliding_window": 19}, False),
        ([20, 3], {"dropout": 0.5}, False),
    ],
)
def test_examples_attend_together_only_where_that_is_the_same(
    lengths: list[int], given: dict[str, Any], is_together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from hotlap.train import attention, short

    asked = list[Any]()
    attend = short.attend
    monkeypatch.setattr(short, "attend", lambda *each: asked.append(each) or attend(*each))
    ends_E = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    states = [torch.randn(1, heads, sum(lengths), 8, dtype=torch.float64) for heads in (4, 2, 2)]
    out, _ = attention.attend_by_example(torch.nn.Module(), *states, None, cu_seq_lens_q=ends_E, **given)
    assert out.shape == (1, sum(lengths), 4, 8) and bool(asked) == is_together


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "gemma4"])
def test_each_family_attends_in_each_example_by_itself_as_by_a_mask(family: str, tmp_path: Path) -> None:
    """Fewer keys than queries, windows in some layers, layers that share keys."""
    ours, data = adapted(make_family(tmp_path / family, family)), packed(tmp_path)
    by_mask = loss_of(ours, data)
    ours.use_kernel("examples")
    assert_same(by_mask, loss_of(ours, data))


def test_answers_are_made_as_by_a_mask(tiny_model: Path) -> None:
    """Padded on the left, with a cache: no examples are told then."""
    import torch

    ours = adapted(tiny_model)
    ours.peft_model.eval()
    tokens = torch.arange(40, 60).reshape(2, 10)
    is_token = torch.ones_like(tokens)
    is_token[1, :4] = 0
    given: Any = {"input_ids": tokens, "attention_mask": is_token, "max_new_tokens": 8, "do_sample": False}
    with torch.inference_mode():
        by_mask = ours.peft_model.generate(**given, pad_token_id=256).tolist()
        ours.use_kernel("examples")
        assert ours.peft_model.generate(**given, pad_token_id=256).tolist() == by_mask


def test_a_layer_that_bends_its_scores_keeps_the_mask(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)).save_pretrained(tmp_path / "gemma2")
    ours, data = adapted(tmp_path / "gemma2"), packed(tmp_path)
    by_mask = loss_of(ours, data)
    with pytest.raises(ConfigError, match=r"'examples' does not work here: its layers attend with softcap"):
        ours.use_kernel("examples")
    assert loss_of(ours, data)[0] == by_mask[0]


def loss_in_this_mode(adapted: Any, data: PackedDataset) -> float:
    from hotlap.train.step import batch_loss, read_batch

    return float(batch_loss(adapted, read_batch(data, np.arange(data.num_rows))).detach())


def test_a_kernel_that_mixes_examples_is_refused_and_the_mask_stays(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, data = adapted(tiny_model), packed(tmp_path)
    by_mask = loss_of(ours, data)
    register(monkeypatch, one_row)
    with pytest.raises(ConfigError, match=r"'flash' is not seen to keep examples of a row apart. Set slice.attention"):
        ours.use_kernel("flash")
    assert loss_of(ours, data)[0] == by_mask[0]
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"'flash' does not work here: .*. Set slice.attention_kernel = 'mask'"):
        ours.use_kernel("flash")  # the real one, without its package
    assert loss_of(ours, data)[0] == by_mask[0]


@pytest.mark.parametrize("window", [None, WINDOW])
def test_the_flex_mask_is_the_mask(window: int | None) -> None:
    import torch
    from torch.nn.attention.flex_attention import create_mask

    from hotlap.train.attention import flex_mask
    from hotlap.train.masks import Window, masks_of

    segments_BT = torch.tensor([[1] * 150 + [2] * 40 + [3] * 5 + [0] * 7, [1] * 202])
    found = create_mask(flex_mask(segments_BT, window).mask_mod, 2, 1, 202, 202, device="cpu")
    expected = masks_of(segments_BT, None if window is None else Window(window, is_everywhere=True))
    assert isinstance(expected, torch.Tensor) and torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_mask_s_loss(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, and without the backward pass: it has none on a processor."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations import flex_attention as theirs

    monkeypatch.setattr(theirs, "WrappedFlexAttention", lambda training: lambda: flex_attention)
    ours, data = adapted(folder), packed(tmp_path)
    ours.peft_model.eval()
    with torch.no_grad():
        by_mask = loss_in_this_mode(ours, data)
        ours.use_kernel("flex")
        assert loss_in_this_mode(ours, data) == pytest.approx(by_mask, rel=1e-5)


@pytest.mark.parametrize(
    ("wanted", "device", "precision", "is_flash_here", "expected"),
    [
        ("auto", "cuda", "bfloat16", True, "flash"),
        ("auto", "cuda", "bfloat16", False, "mask"),
        ("auto", "cuda", "float32", True, "mask"),
        ("auto", "cpu", "bfloat16", True, "examples"),
        ("examples", "cpu", "float32", False, "examples"),
        ("examples", "cuda", "float32", False, "examples"),
        ("mask", "cuda", "bfloat16", True, "mask"),
        ("flash", "cuda", "float16", True, "flash"),
        ("flash", "cuda", "float16", False, "no flash-attn package"),
        ("flash", "cuda", "float32", True, "float32 numbers"),
        ("flash", "cpu", "bfloat16", True, "no CUDA device"),
        ("flex", "cuda", "float32", False, "flex"),
        ("flex", "cpu", "float32", False, "no CUDA device"),
    ],
)
def test_the_kernel_is_what_works_here(
    wanted: str, device: str, precision: str, is_flash_here: bool, expected: str
) -> None:
    from hotlap.train.attention import choose_kernel

    if " " in expected:
        with pytest.raises(ConfigError, match=expected):
            choose_kernel(wanted, device, precision, is_flash_here)
        return
    kernel, why = choose_kernel(wanted, device, precision, is_flash_here)
    assert kernel == expected and (why is None) == ((wanted, device) == ("auto", "cpu"))
    if why is None:
        return
    assert why.startswith("Attention between packed examples is blocked by ")
    assert ("as slice.attention_kernel says" in why) == (wanted != "auto")


def test_a_run_says_what_it_attends_with_and_falls_back_only_if_left_the_choice(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from hotlap.train import assembly, attention

    register(monkeypatch, one_row)
    monkeypatch.setattr(attention, "kernel_here", lambda wanted, precision, device: ("flash", "By FlashAttention."))
    ours, said = adapted(tiny_model), list[str]()
    for wanted in ("auto", "flash"):
        config = tiny_config(tiny_model, tmp_path, tmp_path, slice__attention_kernel=wanted)
        context: Any = SimpleNamespace(config=config, say=said.append)
        if wanted == "flash":
            with pytest.raises(ConfigError):
                assembly._choose_attention(ours, "bfloat16", context)
        else:
            assembly._choose_attention(ours, "bfloat16", context)
    assert len(said) == 1 and said[0].endswith("A mask blocks attention between packed examples now.")
