"""The single-file GPT: what its model may see, what its numbers are, and how a run ends."""

import hashlib
import io
import itertools
import json
import math
import random
import shlex
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

pytestmark = pytest.mark.torch

SHAKESPEARE = Path(__file__).resolve().parents[2] / "shared" / "data" / "text" / "tinyshakespeare.txt"
SMALL = {"width": 32, "depth": 1, "context": 16, "batch_size": 4, "input_ngram": 2, "table_rows": 4096}


@pytest.fixture(scope="module")
def gpt() -> Iterator[ModuleType]:
    import torch

    from hotlap.research import gpt

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield gpt
    torch.set_num_threads(num_threads)


class Ticks:
    """A clock on which every reading is a hundredth of a second later, so that a budget is a number of steps."""

    def __init__(self) -> None:
        self.readings = itertools.count()

    def __call__(self) -> float:
        return next(self.readings) / 100


def model_of(gpt: ModuleType, num_symbols: int = 11, **config: Any) -> Any:
    """A model none of whose parameters is zero any more, as zeros would hide what is wired wrongly."""
    import torch

    torch.manual_seed(1)
    model = gpt.GPT(gpt.resolve({**SMALL, **config}), num_symbols)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.3 * torch.randn_like(param))
    return model.eval()


def text_data(gpt: ModuleType, num: int, letters: int = 5, seed: int = 0) -> Any:
    """Text in which a symbol depends on the two before it."""
    import numpy as np

    dice = random.Random(seed)
    symbols = [0, 1]
    while len(symbols) < num:
        symbols.append((2 * symbols[-1] + symbols[-2] + dice.choice((0, 0, 0, 1))) % letters)
    return gpt.Data(np.array(symbols), num * 9 // 10, letters, {})


# --- model ---

SWITCHES: list[dict[str, Any]] = [
    {},
    {"qk_norm": False},
    {"skip_scalars": False},
    {"value_embeddings": False},
    {"input_ngram": 1},
    {"input_ngram": 8},
    {"depth": 3, "head_dim": 16, "mlp_ratio": 2},
    {"softcap": 5.0, "rope_base": 100.0},
]


@pytest.mark.parametrize("config", SWITCHES, ids=str)
def test_no_logit_sees_a_later_symbol(gpt: ModuleType, config: dict[str, Any]) -> None:
    import torch

    model = model_of(gpt, **config)
    before = torch.randint(11, (2, 16))
    after = before.clone()
    after[0, 9] = (after[0, 9] + 1) % 11
    one, two = model(before), model(after)
    assert torch.equal(one[0, :9], two[0, :9])
    assert torch.equal(one[1], two[1])
    assert (one[0, 9:] != two[0, 9:]).any(dim=-1).all()


def test_a_leak_would_be_seen(gpt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above on a model whose attention is not causal."""
    import torch

    true = gpt.F.scaled_dot_product_attention
    monkeypatch.setattr(gpt.F, "scaled_dot_product_attention", lambda q, k, v, is_causal: true(q, k, v))
    with pytest.raises(AssertionError):
        test_no_logit_sees_a_later_symbol(gpt, {})
    assert torch.is_grad_enabled()


def test_rotated_products_depend_on_the_distance_alone(gpt: ModuleType) -> None:
    import torch

    turns = model_of(gpt, context=64).turns.double()
    q, k = torch.randn(2, 1, 32, dtype=torch.float64)
    rotated_q, rotated_k = gpt.rotate(q.expand(64, 32), turns), gpt.rotate(k.expand(64, 32), turns)
    products = rotated_q @ rotated_k.T
    for distance in (0, 1, 7, 40):
        along = products.diagonal(-distance)
        # The table of turns is in float32.
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-5)
    assert not torch.allclose(products[:, 0], products[0, 0].expand(64), atol=1e-2)
    assert torch.allclose(rotated_q.norm(dim=1), q.norm().expand(64), atol=1e-5)


def test_rows_of_ngrams_are_their_own_while_they_fit(gpt: ModuleType) -> None:
    """Every symbol and every pair has a row of its own, the pair that begins a window too; triples share 200 rows."""
    import torch

    ngrams = gpt.NGrams(3, num_symbols=11, max_rows=200, width=1)
    assert ngrams.num_rows == [12, 144, 200]
    symbols = torch.randint(11, (4, 3000))
    parts = []
    for first, end in ((0, 12), (12, 156), (156, 356)):
        with torch.no_grad():
            ngrams.weight.zero_()[first:end, 0] = torch.arange(float(end - first))
        parts.append(ngrams(symbols)[..., 0].long())
    single, pair, triple = parts
    before = torch.cat((torch.full((4, 1), 11), symbols[:, :-1]), dim=1)
    assert torch.equal(single, symbols)
    assert torch.equal(pair, 12 * symbols + before)
    # The same triple has the same row everywhere, and triples spread over nearly all rows.
    rows: dict[tuple[int, ...], int] = {}
    for at in range(2, 3000):
        assert rows.setdefault(tuple(symbols[0, at - 2 : at + 1].tolist()), triple[0, at].item()) == triple[0, at]
    assert len(set(rows.values())) > 190


def test_a_new_model_knows_nothing(gpt: ModuleType) -> None:
    """Head, tables and outputs of blocks begin at zero, so the first loss is the uniform one."""
    import torch

    model = gpt.GPT(gpt.resolve({}), 65)
    assert torch.equal(model(torch.randint(65, (2, 64))), torch.zeros(2, 64, 65))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_has_one_group_and_the_rate_of_its_axis(gpt: ModuleType, optimizer: str) -> None:
    axes = {"embed_lr": 2.0, "head_lr": 3.0, "scalar_lr": 7.0}
    config = gpt.resolve({**axes, "optimizer": optimizer, "lr": 0.01, "depth": 2, "weight_decay": 0.5})
    model = gpt.GPT(config, 65)
    rates: dict[int, tuple[float, float]] = {}
    for each in gpt.make_optimizers(model, config):
        for group in each.param_groups:
            assert group["peak_lr"] == group["lr"]
            for param in group["params"]:
                assert id(param) not in rates
                rates[id(param)] = (group["lr"], group.get("weight_decay", 0.0))
    found = {name: rates[id(param)] for name, param in model.named_parameters()}
    assert found["inputs.weight"] == found["blocks.1.values"] == (0.02, 0.0)
    assert found["head.weight"] == (0.03, 0.0)
    assert found["skips"] == (pytest.approx(0.07), 0.0)
    matrices = {name for name, rate in found.items() if rate == (0.01, 0.5)}
    assert matrices == {f"blocks.{i}.{part}.weight" for i in (0, 1) for part in ("qkv", "out", "up", "down")}
    assert len(found) == len(matrices) + 4


def test_sizes_by_hand(gpt: ModuleType) -> None:
    config = gpt.resolve({**SMALL, "mlp_ratio": 4})
    matrices = 32 * 96 + 32 * 32 + 2 * 4 * 32 * 32 + 11 * 32 + 2
    rows = 12 * 32 + 144 * 32 + 11 * 32
    assert gpt.sizes(gpt.GPT(config, 11), config) == {
        "params": matrices + rows,
        "params_active": matrices + 3 * 32,
        "flops_per_token": 6 * (matrices + 32 * 16),
        "expected_mem_mb": round(
            gpt.BARE_MB + 4 * (4 * (matrices + rows) + (20 * 32 + 9 * 32 + 4 * 11) * 4 * 16) / 2**20
        ),
    }


# --- data, splits, floors ---


def test_splits_share_nothing_and_take_turns(gpt: ModuleType) -> None:
    data = text_data(gpt, 100_000)
    search, lock = data.targets("search").tolist(), data.targets("lock").tolist()
    assert sorted(search + lock) == list(range(90_000, 100_000))
    assert search == [*range(90_000, 92_048), *range(94_096, 96_144), *range(98_192, 100_000)]
    assert lock == [*range(92_048, 94_096), *range(96_144, 98_192)]


def test_a_text_whose_end_repeats_its_beginning_is_refused(gpt: ModuleType, tmp_path: Path) -> None:
    dice = random.Random(0)
    text = "".join(dice.choice("abcdefgh ") for _ in range(30_000))
    (tmp_path / "once.txt").write_text(text + text[:2000][::-1] + "".join(dice.choice("abc") for _ in range(12_000)))
    (tmp_path / "twice.txt").write_text(text + text)
    assert gpt.load(str(tmp_path / "once.txt")).num_symbols == 9
    with pytest.raises(gpt.Refused, match="to validate on are in the text to train on"):
        gpt.load(str(tmp_path / "twice.txt"))


def test_an_epoch_shows_every_window_once_and_nothing_of_the_validation_text(gpt: ModuleType) -> None:
    import numpy as np

    data = gpt.Data(np.arange(1000), 900, 1000, {})
    stream = gpt.batches(data, rows=5, context=10, seed=3)
    for _ in range(2):
        shown: list[int] = []
        for inputs, targets in itertools.islice(stream, 17):
            assert inputs.shape == targets.shape == (5, 10)
            assert (targets == inputs + 1).all()
            shown += inputs.flatten().tolist()
        assert len(set(shown)) == len(shown) == 850
        assert max(shown) < 899
    again = gpt.batches(data, rows=5, context=10, seed=3)
    assert next(again)[0].tolist() != next(gpt.batches(data, rows=5, context=10, seed=4))[0].tolist()


def brute_force_floors(train: list[int], val: list[int], num_symbols: int) -> list[float]:
    text, result = train + val, []
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for n in range(5):
        for at in range(n, len(train)):
            counts[tuple(train[at - n : at])][train[at]] += 1

    def probability(context: tuple[int, ...], symbol: int) -> float:
        shorter = probability(context[1:], symbol) if context else 1 / num_symbols
        seen = counts[context]
        if not seen:
            return shorter
        return (seen[symbol] + len(seen) * shorter) / (seen.total() + len(seen))

    for n in range(5):
        nats = [-math.log(probability(tuple(text[at - n : at]), text[at])) for at in range(len(train), len(text))]
        result.append(sum(nats) / len(val))
    return result


def test_floors_equal_brute_force(gpt: ModuleType) -> None:
    data = text_data(gpt, 2000)
    text = data.symbols.tolist()
    found = gpt.floors(data)
    assert list(found) == ["unigram", "bigram", "trigram", "4gram", "5gram"]
    assert list(found.values()) == pytest.approx(brute_force_floors(text[:1800], text[1800:], 5), abs=1e-12)


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tiny shakespeare lies outside the repository")
def test_floors_of_tiny_shakespeare(gpt: ModuleType) -> None:
    data = gpt.load(str(SHAKESPEARE))
    assert (data.num_train, len(data.symbols) - data.num_train, data.num_symbols) == (1_003_854, 111_540, 65)
    published = {"unigram": 3.347, "bigram": 2.486, "trigram": 2.049, "4gram": 1.774, "5gram": 1.669}
    assert gpt.floors(data) == pytest.approx(published, abs=6e-4)


def test_embedded_text_is_python_s_own_and_hashed(gpt: ModuleType) -> None:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = gpt.load("embedded")
    assert data.facts["sha256"] == hashlib.sha256(text).hexdigest()
    assert (data.facts["train_chars"] + data.facts["val_chars"], data.num_symbols) == (len(text), len(set(text)))
    alphabet = sorted(set(text))
    assert bytes(alphabet[symbol] for symbol in data.symbols.tolist()) == text


# --- schedule and clock ---


@pytest.mark.parametrize(
    ("shape", "at_70", "at_90"),
    [("linear", 0.75, 0.25), ("cosine", 0.5 + 0.25 * math.sqrt(2), 0.5 - 0.25 * math.sqrt(2)), ("sqrt", 0.5, 0.134)],
)
def test_schedule(gpt: ModuleType, shape: str, at_70: float, at_90: float) -> None:
    config = gpt.resolve({"schedule": shape, "warmup": 0.1, "warmdown": 0.4, "lr_floor": 0.2})
    rates = {share: gpt.lr_multiplier(share, config) for share in (0.0, 0.05, 0.1, 0.6, 0.7, 0.9, 1.0)}
    assert rates == pytest.approx(
        {0.0: 0.0, 0.05: 0.5, 0.1: 1.0, 0.6: 1.0, 0.7: 0.2 + 0.8 * at_70, 0.9: 0.2 + 0.8 * at_90, 1.0: 0.2}, abs=1e-4
    )
    constant = gpt.resolve({"warmup": 0.0, "warmdown": 0.0})
    assert [gpt.lr_multiplier(share, constant) for share in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]


def test_a_disturbed_step_is_charged_as_a_quiet_one(gpt: ModuleType) -> None:
    clock = gpt.ChargedClock(budget_s=100.0)
    for step_s in (9.0, 9.0, 9.0, *[1.0] * 37, *[5.0] * 8):
        clock.add(step_s)
    assert clock.is_recharged
    assert clock.charged_s == 48.0  # wall time is 104
    assert clock.fraction == pytest.approx(0.485)
    assert clock.percentile_s(50) == 1.0
    assert clock.percentile_s(95) == 5.0


def test_charged_time_never_goes_back_once_it_was_made_anew(gpt: ModuleType) -> None:
    dice = random.Random(5)
    clock, seen = gpt.ChargedClock(budget_s=30.0), []
    while clock.fraction < 1.0:
        clock.add(dice.uniform(0.1, 0.2) * dice.choice((1, 1, 4)))
        if clock.is_recharged:
            seen.append(clock.charged_s)
    assert seen == sorted(seen)
    assert seen[0] == pytest.approx(3.0, rel=0.5)
    # Half a step more or less.
    assert abs(clock.charged_s - 30.0) <= 0.5 * clock.percentile_s(20) + 1e-9


# --- validation ---


@pytest.mark.parametrize("split", ["search", "lock"])
def test_validation_equals_a_plain_loop(gpt: ModuleType, split: str) -> None:
    """One target after the other, each from the window that the rule gives it."""
    import torch

    data = text_data(gpt, 45_000)
    model = model_of(gpt, num_symbols=5)
    symbols, total, targets = torch.from_numpy(data.symbols), 0.0, 0
    for target in range(data.num_train, 45_000):
        offset = target - data.num_train
        if (offset // 2048) % 2 != (split == "lock") or offset % 97:
            continue
        end = data.num_train + (offset // 8 + 1) * 8
        window = symbols[end - 17 : target]
        total -= model(window[None])[0, -1].double().log_softmax(0)[symbols[target]].item()
        targets += 1

    losses: list[float] = []
    true = gpt.F.cross_entropy

    def kept(logits: Any, wanted: Any, reduction: str) -> Any:
        every = true(logits, wanted, reduction=reduction)
        losses.extend(every[wanted != -100].tolist())
        return every

    gpt.F.cross_entropy = kept
    try:
        mean = gpt.validate(model, data, split, 16)
    finally:
        gpt.F.cross_entropy = true
    positions = data.targets(split).tolist()
    assert len(losses) == len(positions)
    assert mean == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    thinned = [loss for loss, at in zip(losses, positions, strict=True) if (at - data.num_train) % 97 == 0]
    assert len(thinned) == targets
    assert sum(thinned) == pytest.approx(total, rel=1e-5)


def test_validating_teaches_nothing(gpt: ModuleType) -> None:
    import torch

    data, model = text_data(gpt, 45_000), model_of(gpt, num_symbols=5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = [gpt.validate(model, data, split, 16) for split in ("search", "lock")]
    second = [gpt.validate(model, data, split, 16) for split in ("lock", "search")]
    assert first == second[::-1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- configurations ---


def test_defaults_lie_on_their_axes_and_axes_are_json(gpt: ModuleType) -> None:
    done = subprocess.run([sys.executable, "-m", "hotlap.research.gpt", "--axes"], capture_output=True, check=True)
    printed = json.loads(done.stdout)
    assert list(printed) == list(gpt.AXES)
    for name, entry in printed.items():
        axis = gpt.Axis(**{**entry, "choices": entry["choices"] and tuple(entry["choices"])})
        assert axis == gpt.AXES[name]
        assert axis.allows(axis.default), name
        assert axis.kind in ("log", "linear", "integer", "choice")
        assert (axis.choices is None) == (axis.kind != "choice")
        assert axis.kind != "log" or axis.low > 0
    founding = {"lr", "warmup", "weight_decay", "batch_size", "width", "depth", "dropout", "schedule"}
    assert founding <= printed.keys()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"seed": 42}, "seed_init and seed_data beside the config"),
        ({"data_seed": 1}, "a seed is no axis"),
        ({"learning_rate": 1e-3}, "There are: lr, warmup"),
        ({"lr": 1.0}, "low=0.0001, high=0.05"),
        ({"lr": math.nan}, "lr is nan"),
        ({"depth": 2.5}, "integer"),
        ({"depth": True}, "depth is True"),
        ({"batch_size": 17}, "choices=(4, 6"),
        ({"qk_norm": 1}, "qk_norm is 1"),
        ({"schedule": None}, "schedule is None"),
    ],
)
def test_a_config_that_is_refused(gpt: ModuleType, config: dict[str, Any], words: str) -> None:
    with pytest.raises(gpt.Refused) as refused:
        gpt.resolve(config)
    assert words in str(refused.value)


def test_a_config_is_resolved_to_every_axis(gpt: ModuleType) -> None:
    assert gpt.resolve({"lr": 1e-3, "depth": 3.0}) == {name: axis.default for name, axis in gpt.AXES.items()} | {
        "lr": 1e-3,
        "depth": 3,
    }


@pytest.mark.parametrize(
    "order",
    [
        {"config": {"seed": 1}},
        {"config": {}, "seed": 1},
        {"config": {}, "budget_s": 0},
        {"config": {}, "splits": ["test"]},
        {"config": {}, "device": "tpu"},
        {"config": {}, "data": "missing.txt"},
    ],
)
def test_an_order_that_is_refused_is_exit_2(
    gpt: ModuleType, order: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "order.json"
    path.write_text(json.dumps({**order, "out": str(tmp_path / "result.json")} | order))
    assert gpt.main([str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert [each.name for each in tmp_path.iterdir()] == ["order.json"]


# --- runs ---


@pytest.fixture
def book(tmp_path: Path) -> Callable[[int], Path]:
    """A text with learnable order, 50,000 bytes of it; another number changes its last tenth alone."""

    def write(ending: int) -> Path:
        dice = random.Random(0)
        words = [dice.choice(["lap ", "slice ", "clock ", "budget "]) for _ in range(9000)]
        train = "".join(words)[:45_000]
        rest = [random.Random(ending).choice(words) for _ in range(1)] + random.Random(ending).sample(words, 2000)
        path = tmp_path / f"book{ending}.txt"
        path.write_text(train + "".join(rest)[:5000])
        assert path.stat().st_size == 50_000
        return path

    return write


def trial_of(gpt: ModuleType, data: Path, steps: int, **order: Any) -> Any:
    config = {**SMALL, **order.pop("config", {})}
    return gpt.Trial(gpt.Order(config=config, budget_s=steps / 100, data=str(data), **order), Ticks())


TIMES = {"cpu_s", "peak_mem_mb", "validity", "machine", "total_s", "setup_s", "warm_s", "wall_s", "eval_s"}


def test_same_seeds_same_result(gpt: ModuleType, book: Callable[[int], Path]) -> None:
    config = {"dropout": 0.1}
    runs = [trial_of(gpt, book(0), 60, config=config, seed_init=3, seed_data=4).run() for _ in range(2)]
    assert runs[0]["steps"] == 60
    one, two = ({name: value for name, value in run.items() if name not in TIMES} for run in runs)
    assert one == two
    for seeds in ({"seed_init": 3, "seed_data": 5}, {"seed_init": 2, "seed_data": 4}):
        other = trial_of(gpt, book(0), 60, config=config, **seeds).run()
        assert other["val_search_nats_per_byte"] != one["val_search_nats_per_byte"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_learns_more_than_bigrams(gpt: ModuleType, book: Callable[[int], Path], optimizer: str) -> None:
    config = {"optimizer": optimizer, "batch_size": 8}
    result = trial_of(gpt, book(0), 120, config=config, splits=("search", "lock")).run()
    assert result["status"] == "ok"
    assert result["val_search_nats_per_byte"] < result["floors"]["bigram"]
    assert result["val_lock_nats_per_byte"] < result["floors"]["bigram"]
    assert result["loss_curve"][-1][1] < result["loss_curve"][0][1]
    assert result["lr_at_end"] == pytest.approx(0.05 * result["config"]["lr"], rel=0.2)


def test_validation_text_does_not_touch_training(gpt: ModuleType, book: Callable[[int], Path]) -> None:
    one, two = (trial_of(gpt, book(ending), 40).run() for ending in (0, 1))
    assert one["data"]["sha256"] != two["data"]["sha256"]
    assert one["loss_curve"] == two["loss_curve"]
    assert one["train_loss_ema"] == two["train_loss_ema"]
    assert one["val_search_nats_per_byte"] != two["val_search_nats_per_byte"]


@pytest.fixture
def failing(gpt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Any, Any], Any]], Any]]:
    """Puts a fault into the loss of the third training step; the list holds the model."""
    true, models = gpt.loss_of, list[Any]()

    def install(fault: Callable[[Any, Any], Any]) -> list[Any]:
        calls = itertools.count()

        def loss_of(model: Any, stream: Any) -> Any:
            loss = true(model, stream)
            models[:] = [model]
            return fault(loss, model) if next(calls) >= 3 + 2 else loss  # three warm up

        monkeypatch.setattr(gpt, "loss_of", loss_of)
        return models

    yield install


def infinite_slope(loss: Any, model: Any) -> Any:
    """A finite loss whose gradient is NaN."""
    return loss + (model.head.weight.sum() * 0.0).sqrt()


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (lambda loss, model: loss * math.nan, "nan"),
        (lambda loss, model: loss * math.inf, "nan"),
        (infinite_slope, "nan"),
        (lambda loss, model: loss * 1e30, "diverged"),
    ],
    ids=["nan", "inf", "nan gradient", "1e30"],
)
def test_b55_a_broken_loss_ends_the_run_at_its_step(
    gpt: ModuleType, book: Callable[[int], Path], failing: Any, fault: Any, status: str
) -> None:
    assert not math.nan > 100, "the naive guard `loss > 100` lets a NaN pass"
    models = failing(fault)
    result = trial_of(gpt, book(0), 1000).run()
    assert (result["status"], result["steps"]) == (status, 2)
    assert result["val_search_nats_per_byte"] is None and result["val_search_bpb"] is None
    assert "after 2 steps" in result["error_tail"] or status == "diverged"
    assert all(param.isfinite().all() for param in models[0].parameters())
    json.dumps(result, allow_nan=False)


def test_b55_nan_in_the_validation_alone(
    gpt: ModuleType, book: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt, "validate", lambda *_: math.nan)
    result = trial_of(gpt, book(0), 30).run()
    assert (result["status"], result["steps"]) == ("nan", 30)
    assert result["val_search_nats_per_byte"] is None
    assert result["train_loss_ema"] is not None


def test_b55_a_loss_of_zero_is_suspicious(gpt: ModuleType, book: Callable[[int], Path], failing: Any) -> None:
    failing(lambda loss, model: loss * 0.0)
    result = trial_of(gpt, book(0), 800, config={"warmdown": 0.0}).run()
    assert result["status"] == "ok"
    assert result["train_loss_ema"] < 1e-6
    assert "zero_loss" in result["validity"]["flags"]


def test_a_loss_that_never_falls_below_uniform_has_diverged(
    gpt: ModuleType, book: Callable[[int], Path], failing: Any
) -> None:
    failing(lambda loss, model: loss * 0.0 + math.log(17))
    result = trial_of(gpt, book(0), 200).run()
    assert result["status"] == "diverged"
    assert 0.2 * 200 <= result["steps"] <= 0.2 * 200 + 2


def test_running_out_of_memory_has_a_status(gpt: ModuleType, book: Callable[[int], Path], failing: Any) -> None:
    import torch

    failing(lambda loss, model: loss + torch.empty(10**15).sum())
    result = trial_of(gpt, book(0), 100).run()
    assert (result["status"], result["error_class"], result["steps"]) == ("oom", "RuntimeError", 2)


def test_a_crash_is_told_with_its_tail(gpt: ModuleType, book: Callable[[int], Path], failing: Any) -> None:
    failing(lambda loss, model: loss / (1 // 0))
    result = trial_of(gpt, book(0), 100).run()
    assert (result["status"], result["error_class"]) == ("crash", "ZeroDivisionError")
    assert result["error_tail"].rstrip().endswith("integer division or modulo by zero")
    assert len(result["error_tail"]) <= 2000


CALM = {"wall_s": 10.0, "cpu_s": 9.9, "charged_s": 9.8, "steps_s": [0.1] * 98, "probes": [0.3, 0.3], "psi": "0.50"}


@pytest.mark.parametrize(
    ("signs", "flags"),
    [
        ({}, []),
        ({"wall_s": 11.5, "cpu_s": 11.4}, ["wall_over_charged"]),
        ({"cpu_s": 8.9}, ["cpu_util"]),
        ({"psi": "20.50"}, ["psi_avg10"]),
        ({"psi": None}, []),
        ({"probes": [0.3, 0.32]}, ["probe"]),
        ({"probes": [0.3]}, []),
        ({"wall_s": None, "cpu_s": None, "charged_s": 0.0, "steps_s": [], "probes": []}, []),
        # A step that is cheap one time in three is charged at the price of the cheap one, so it must be seen.
        ({"steps_s": [0.1] * 33 + [0.13] * 65}, ["uneven_steps"]),
        ({"steps_s": [0.1] * 33 + [0.13] * 65, "cpu_s": 8.9}, ["cpu_util"]),
    ],
)
def test_flags_of_a_disturbed_machine(
    gpt: ModuleType,
    book: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
    signs: dict[str, Any],
    flags: list[str],
) -> None:
    trial, given = trial_of(gpt, book(0), 10), CALM | signs
    trial.seconds |= {"wall_s": given["wall_s"], "cpu_s": given["cpu_s"]}
    trial.clock.charged_s, trial.clock.ordered_s = given["charged_s"], given["steps_s"]
    trial.probes = given["probes"]
    told = f"some avg10={given['psi']} avg60=9.99 avg300=9.99 total=1\nfull avg10=9.99" if given["psi"] else ""
    monkeypatch.setattr(gpt, "text_of", lambda path: told)
    found = trial.validity()
    assert found["flags"] == flags
    assert found["psi_avg10"] == (float(given["psi"]) if given["psi"] else None)
    assert set(found) == {*SIGNS, "flags"}


# --- the command line ---

NUMBER, MAYBE, COUNT = {"type": "number"}, {"type": ["number", "null"]}, {"type": "integer", "minimum": 0}
FLOORS = ("uniform", "unigram", "bigram", "trigram", "4gram", "5gram")
SIGNS = ("wall_over_charged", "cpu_util", "psi_avg10", "probe_before", "probe_after")


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMA = closed(
    status={"enum": ["ok", "nan", "diverged", "oom", "crash"]},
    error_class={"type": ["string", "null"]},
    error_tail={"type": ["string", "null"]},
    floors=closed(**dict.fromkeys(FLOORS, NUMBER)),
    loss_curve={"type": "array", "maxItems": 64, "items": {"type": "array", "items": NUMBER, "minItems": 2}},
    validity=closed(**dict.fromkeys(SIGNS, MAYBE), flags={"type": "array", "items": {"type": "string"}}),
    machine={"type": "object", "required": ["host", "cpu", "cores", "threads", "ram_gb", "gpu", "torch", "python"]},
    data={"type": "object", "required": ["source", "sha256", "train_chars", "val_chars"]},
    config={"type": "object", "not": {"anyOf": [{"required": ["seed"]}, {"required": ["seed_init"]}]}},
    **dict.fromkeys(
        ("steps", "tokens", "params", "params_active", "flops_per_token", "val_tokens", "val_bytes"), COUNT
    ),
    expected_mem_mb=COUNT,
    **dict.fromkeys(("val_search_nats_per_byte", "val_search_bpb", "val_lock_nats_per_byte", "train_loss_ema"), MAYBE),
    **dict.fromkeys(("budget_s", "charged_s", "total_s", "epochs", "peak_mem_mb"), NUMBER),
    **dict.fromkeys(("wall_s", "cpu_s", "setup_s", "warm_s", "eval_s", "tokens_per_s", "lr_at_end"), MAYBE),
    **dict.fromkeys(("step_ms_p20", "step_ms_p50", "step_ms_p95", "grad_norm_p50", "grad_norm_p99"), MAYBE),
)


def test_a_real_run_through_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    order = {"config": SMALL, "budget_s": 2.0, "seed_init": 5, "seed_data": 6, "data": "embedded", "threads": 1}
    order |= {"device": "cpu", "splits": ["search", "lock"], "out": str(out)}
    (tmp_path / "order.json").write_text(json.dumps(order))
    command = [sys.executable, "-m", "hotlap.research.gpt", str(tmp_path / "order.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == out.read_text()
    result = json.loads(out.read_text())
    jsonschema.validate(result, SCHEMA)
    assert result["status"] == "ok"
    assert result["val_search_nats_per_byte"] < result["floors"]["unigram"] < result["floors"]["uniform"]
    assert result["val_search_bpb"] == pytest.approx(result["val_search_nats_per_byte"] / math.log(2))
    assert result["charged_s"] == pytest.approx(2.0, abs=result["step_ms_p95"] / 1000)
    assert result["tokens"] == 64 * result["steps"]
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert told and all(line.keys() == {"fraction", "loss"} for line in told)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["order.json", "result.json"]


def test_commands_of_the_page_run(
    gpt: ModuleType,
    book: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Path(__file__).parent.parent / "docs" / "gpt.md"
    monkeypatch.chdir(tmp_path)
    book(0).rename("my.txt")
    Path("ORDER.json").write_text(json.dumps({"config": SMALL, "budget_s": 0.2, "data": "my.txt"}))
    commands = [line for line in page.read_text().splitlines() if line.startswith("$ python -m hotlap.research.gpt")]
    assert len(commands) == 3
    for command in commands:
        argv = shlex.split(command.replace("--budget-s 20", "--budget-s 0.2"), comments=True)[4:]
        assert gpt.main(argv) == 0
        json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(Path("result.json").read_text())["config"]["depth"] == 3


def test_flags_make_the_same_order(gpt: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    assert gpt.main(["--budget-s", "0.3", "--set", "lr=3e-3", "--set", "schedule=cosine", *sets]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["config"] == gpt.resolve({**SMALL, "lr": 0.003, "schedule": "cosine"})
    assert result["budget_s"] == 0.3


def test_sizes_are_told_before_anything_is_built(
    gpt: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For whole configurations and for partial ones; the largest would not fit any memory."""
    huge = {"width": 768, "depth": 12, "batch_size": 128, "context": 512}
    asked = {"data": "embedded", "configs": [SMALL, gpt.resolve(SMALL), huge]}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asked)))
    assert gpt.main(["--sizes"]) == 0
    small, same, large = json.loads(capsys.readouterr().out)
    config = gpt.resolve(SMALL)
    assert small == same == gpt.sizes(gpt.GPT(config, gpt.load("embedded").num_symbols), config)
    assert large["expected_mem_mb"] > 20_000 > 100 * gpt.BARE_MB / small["expected_mem_mb"]
