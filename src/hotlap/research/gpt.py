"""A small GPT trained from scratch for a fixed number of charged seconds: one file, one run, one JSON result.

It stands alone and reads from top to bottom: axes, data, floors, model, optimizers, schedule, clock, validation, run.
`docs/gpt.md` says how to use it. Letters in names of tensors: B rows, T positions, D model width, H heads, K head
width, V symbols.
"""

import argparse
import bisect
import contextlib
import gc
import hashlib
import json
import math
import os
import platform
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

# OpenMP reads it when torch is loaded; its waiting threads spin otherwise, and slow down whatever runs beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Config = dict[str, Any]

# --- axes: everything a configuration can say. Seeds, budget and data belong to the order, never to a configuration ---


class Axis(NamedTuple):
    """One dimension of the search space.

    kind: `log` and `linear` are real numbers, `int` counts, `choice` takes one of `choices`; choices that are numbers
    are a ladder, so that neighbors are alike.
    """

    default: Any
    kind: Literal["log", "linear", "int", "choice"]
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] | None = None


SWITCH = (False, True)

AXES: dict[str, Axis] = {
    "lr": Axis(6e-3, "log", 1e-4, 5e-2),  # of weight matrices; the other groups are multiples of it
    "warmup": Axis(0.02, "linear", 0.0, 0.3),  # fraction of the budget
    "weight_decay": Axis(0.1, "log", 1e-3, 1.0),  # of weight matrices
    "batch_size": Axis(16, "choice", choices=(4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)),  # rows
    "width": Axis(64, "choice", choices=(32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768)),
    "depth": Axis(2, "int", 1, 12),
    "dropout": Axis(0.0, "linear", 0.0, 0.5),
    "schedule": Axis("linear", "choice", choices=("linear", "cosine", "sqrt")),  # shape of the warm-down
    "warmdown": Axis(0.6, "linear", 0.0, 1.0),  # fraction of the budget; 0 is a constant learning rate
    "lr_floor": Axis(0.05, "linear", 0.0, 0.5),  # where the warm-down ends, as a multiple of lr
    "context": Axis(64, "choice", choices=(16, 32, 64, 128, 256, 512)),  # symbols; divides BLOCK
    "head_dim": Axis(32, "choice", choices=(16, 32, 64, 128)),
    "mlp_ratio": Axis(4, "int", 1, 8),
    "rope_base": Axis(1e4, "log", 1e2, 1e6),
    "qk_norm": Axis(True, "choice", choices=SWITCH),
    "softcap": Axis(15, "choice", choices=(None, 10, 15, 20, 30)),
    "skip_scalars": Axis(True, "choice", choices=SWITCH),  # learned weights of the residual and of the embedding
    "value_embeddings": Axis(True, "choice", choices=SWITCH),  # on every second block, counted from the last
    "input_ngram": Axis(2, "int", 1, 4),  # the longest n-gram with an input embedding of its own
    "logit_ngram": Axis(1, "int", 0, 4),  # the longest n-gram with a row of logits of its own; 0 is none
    "table_rows": Axis(8192, "choice", choices=(4096, 8192, 16384, 32768, 65536)),  # n-grams share rows above it
    "optimizer": Axis("adamw", "choice", choices=("adamw", "muon")),  # muon pays from about 10 T D tokens a batch
    "beta1": Axis(0.9, "linear", 0.5, 0.98),  # also Muon's momentum
    "beta2_half_life": Axis(70_000, "log", 1e3, 1e7),  # tokens until a squared gradient counts half
    "embed_lr": Axis(1.0, "log", 0.05, 100.0),  # multiples of lr: symbol embeddings,
    "head_lr": Axis(1.0, "log", 0.05, 100.0),  # the output layer,
    "table_lr": Axis(3.0, "log", 0.05, 100.0),  # n-gram tables,
    "scalar_lr": Axis(1.0, "log", 0.05, 100.0),  # and skip scalars
}


class Refused(Exception):
    """An order that cannot be carried out as it stands: exit code 2."""


def resolve(given: Config) -> Config:
    """Every axis with its value. Raises Refused for a seed, an unknown axis, and a value outside its range."""
    for name in given:
        if "seed" in name.lower():
            raise Refused(f"{name!r} in the config: a seed is no axis. Put seed_init and seed_data beside the config.")
        if name not in AXES:
            raise Refused(f"There is no axis {name!r}. Known: {', '.join(AXES)}.")
    return {name: checked(name, given.get(name, axis.default)) for name, axis in AXES.items()}


def checked(name: str, value: Any) -> Any:
    """A value that its axis allows, as a number of the axis's kind."""
    axis = AXES[name]
    if axis.kind == "choice":
        for choice in axis.choices or ():
            if value == choice and isinstance(value, bool) == isinstance(choice, bool):
                return choice
        raise Refused(f"{name} is {value!r}; it may be one of {axis.choices}.")
    assert axis.low is not None and axis.high is not None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not axis.low <= value <= axis.high or (axis.kind == "int" and value != int(value)):
        kind = "a whole number" if axis.kind == "int" else "a number"
        raise Refused(f"{name} is {value!r}; it must be {kind} from {axis.low:g} to {axis.high:g}.")
    return int(value) if axis.kind == "int" else float(value)


# --- data: one text, nine tenths to train, one tenth to judge by ---

BLOCK = 2048
"""Symbols of validation text in a row that belong to one split; even blocks are searched with, odd ones stay locked.
Interleaved, because two halves of a text differ far more than two configurations do."""

MAX_CHARS = 512
"""A text with more different characters than this is read as bytes."""


@dataclass(frozen=True)
class Data:
    """A text as numbers. The last tenth is only ever validated on."""

    symbols: Ints
    """The whole text; symbols that the training text lacks are all the last one."""
    bytes_of: Ints
    """UTF-8 bytes of every position."""
    num_train: int
    num_symbols: int
    escape_nats: float
    """What it costs to name a symbol that the training text lacks, beyond saying that it is one."""
    facts: dict[str, Any]

    @property
    def num_val(self) -> int:
        return len(self.symbols) - self.num_train

    def targets(self, split: str) -> Ints:
        """Positions in `symbols` that a split predicts, all of them once."""
        offsets = np.arange(self.num_val)
        return self.num_train + offsets[offsets // BLOCK % 2 == (split == "lock")]


def read_text(source: str) -> tuple[bytes, str]:
    """The text's bytes, and what there is to say of it."""
    if source != "embedded":
        try:
            return Path(source).read_bytes(), source
        except OSError as error:
            raise Refused(f"Cannot read {source}: {error.strerror}. Name a text file, or 'embedded'.") from error
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    note = f"pydoc_data.topics of Python {platform.python_version()}: other releases have other text, compare sha256"
    return text.encode(), note


def load(source: str) -> Data:
    """Characters where the text is UTF-8 and has few different ones, bytes otherwise."""
    raw, note = read_text(source)
    try:
        points = np.frombuffer(raw.decode().encode("utf-32-le"), dtype=np.uint32).astype(np.int64)
        is_chars = len(np.unique(points)) <= MAX_CHARS
    except UnicodeDecodeError:
        points, is_chars = np.empty(0, np.int64), False
    if not is_chars:
        points = np.frombuffer(raw, dtype=np.uint8).astype(np.int64)
    num_train = int(len(points) * 0.9)
    if len(points) - num_train < 2 * BLOCK:
        raise Refused(f"{source} has {len(points)} symbols; {20 * BLOCK} are the least, so that both splits have text.")
    known = np.unique(points[:num_train])
    symbols = np.minimum(np.searchsorted(known, points), len(known) - 1)
    is_unknown = known[symbols] != points
    symbols[is_unknown] = len(known)
    bytes_of = np.ones_like(points)
    if is_chars:
        bytes_of += (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    facts = {"source": note, "sha256": hashlib.sha256(raw).hexdigest(), "level": "char" if is_chars else "byte"}
    facts |= {"train_chars": num_train, "val_chars": len(points) - num_train, "symbols": len(known)}
    return Data(
        symbols=symbols,
        bytes_of=bytes_of,
        num_train=num_train,
        num_symbols=len(known) + int(is_unknown.any()),
        escape_nats=math.log(0x110000 if is_chars else 256),
        facts=facts,
    )


def batches(data: Data, rows: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets [B, T] from the training text for ever; an epoch shows every window of a random tiling once."""
    rng = np.random.default_rng(seed)
    train = torch.from_numpy(data.symbols[: data.num_train])
    if data.num_train < (rows + 2) * context:
        raise Refused(f"{data.num_train} symbols are too few for rows of {context} times {rows}. Lower batch_size.")
    offsets = torch.arange(context + 1)
    while True:
        starts = np.arange(rng.integers(context), data.num_train - context, context)
        order = rng.permutation(starts)
        for at in range(0, len(order) - rows + 1, rows):
            window = train[torch.from_numpy(order[at : at + rows])[:, None] + offsets]
            yield window[:, :-1], window[:, 1:]


# --- floors: what counting n-grams of the training text gets ---


def floors(data: Data, longest: int = 5) -> dict[str, float]:
    """Nats per byte of the validation text under interpolated Witten-Bell counts, n-gram by n-gram."""
    names = ["unigram", "bigram", "trigram", *(f"{n}gram" for n in range(4, longest + 1))]
    targets = np.arange(data.num_train, len(data.symbols))
    escape = np.where(data.symbols[targets] >= data.facts["symbols"], data.escape_nats, 0.0)
    num_bytes = int(data.bytes_of[targets].sum())

    def nats_per_byte(p: Floats) -> float:
        return float((escape - np.log(p)).sum()) / num_bytes

    p = np.full(len(targets), 1.0 / data.num_symbols)
    result = {"uniform": nats_per_byte(p)}
    context = np.zeros_like(data.symbols)  # of each position: the symbols before it, as one number
    for n, name in enumerate(names):
        if n:
            context[n:] += data.symbols[:-n] * data.num_symbols ** (n - 1)
        p = witten_bell(context, data.symbols, data.num_symbols, n, targets, p)
        result[name] = nats_per_byte(p)
    return result


def witten_bell(context: Ints, symbols: Ints, num_symbols: int, n: int, targets: Ints, shorter: Floats) -> Floats:
    """P(target | context) = (count + kinds * P(target | shorter context)) / (total + kinds)."""
    seen = slice(n, targets[0])
    grams, counts = np.unique(context[seen] * num_symbols + symbols[seen], return_counts=True)
    contexts, first, kinds = np.unique(grams // num_symbols, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first)
    count = looked_up(grams, counts, context[targets] * num_symbols + symbols[targets])
    kind = looked_up(contexts, kinds, context[targets])
    total = looked_up(contexts, totals, context[targets])
    return np.where(total > 0, (count + kind * shorter) / np.maximum(total + kind, 1), shorter)


def looked_up(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """The value of each wanted key, 0 where there is none; keys are sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


# --- model ---


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rope_tables(context: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, K/2] of the angle by which each position turns each pair of channels."""
    speeds = base ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(context)[:, None] * speeds
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of the last dimension against each other, so that a dot product sees only distances."""
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, one * sin + two * cos), dim=-1)


def ngram_rows(symbols_BT: Tensor, length: int, num_symbols: int, table_rows: int) -> Tensor:
    """The row of a table for the last `length` symbols at each position; a hash where the n-grams outnumber the rows.

    Before the start of the window stands a symbol of its own.
    """
    base = num_symbols + 1
    ids = symbols_BT
    for back in range(1, length):
        ids = ids * base + F.pad(symbols_BT, (back, 0), value=num_symbols)[:, : symbols_BT.shape[1]]
    return ids if base**length <= table_rows else (ids * 0x9E3779B1 >> 15) % table_rows


class Table(nn.Module):
    """A learned row for every n-gram of one length, all zeros at first. [B, T] -> [B, T, columns]"""

    def __init__(self, length: int, num_symbols: int, table_rows: int, columns: int) -> None:
        super().__init__()
        self.length, self.num_symbols, self.table_rows = length, num_symbols, table_rows
        self.weight = nn.Parameter(torch.zeros(min((num_symbols + 1) ** length, table_rows), columns))

    def forward(self, symbols_BT: Tensor) -> Tensor:
        return F.embedding(ngram_rows(symbols_BT, self.length, self.num_symbols, self.table_rows), self.weight)


class Block(nn.Module):
    """Attention, then a ReLU² MLP; both read a normalized stream and add to it."""

    def __init__(self, config: Config, num_symbols: int, has_values: bool) -> None:
        super().__init__()
        width, self.head_dim = config["width"], config["head_dim"]
        self.heads = max(1, width // self.head_dim)
        inner = self.heads * self.head_dim
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)
        self.up = nn.Linear(width, config["mlp_ratio"] * width, bias=False)
        self.down = nn.Linear(config["mlp_ratio"] * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)
        self.values = nn.Parameter(torch.zeros(num_symbols, inner)) if has_values else None
        self.qk_norm: bool = config["qk_norm"]
        self.dropout: float = config["dropout"]

    def forward(self, x_BTD: Tensor, symbols_BT: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTD = x_BTD + F.dropout(self.attend(rms_norm(x_BTD), symbols_BT, cos, sin), self.dropout, self.training)
        hidden = F.relu(self.up(rms_norm(x_BTD))).square()
        return x_BTD + F.dropout(self.down(hidden), self.dropout, self.training)

    def attend(self, x_BTD: Tensor, symbols_BT: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, context, _ = x_BTD.shape
        qk, v = self.qkv(x_BTD).split((2 * self.heads * self.head_dim, self.heads * self.head_dim), dim=-1)
        if self.values is not None:
            v = v + F.embedding(symbols_BT, self.values)
        qk = rotate(qk.view(rows, context, 2 * self.heads, self.head_dim).transpose(1, 2), cos, sin)
        q, k = (rms_norm(qk) if self.qk_norm else qk).chunk(2, dim=1)
        v = v.view(rows, context, self.heads, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, context, -1))


class GPT(nn.Module):
    """Logits of the next symbol. [B, T] -> [B, T, V]"""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config, num_symbols: int) -> None:
        super().__init__()
        width, depth = config["width"], config["depth"]
        tables = (num_symbols, config["table_rows"])
        self.embed = nn.Embedding(num_symbols, width)
        self.inputs = nn.ModuleList(Table(n, *tables, width) for n in range(2, config["input_ngram"] + 1))
        has_values = [config["value_embeddings"] and (depth - 1 - i) % 2 == 0 for i in range(depth)]
        self.blocks = nn.ModuleList(Block(config, num_symbols, has) for has in has_values)
        # Weight of the stream, and of the embedding, at the door of each block.
        self.skips = nn.Parameter(torch.tensor([[1.0, 0.0]] * depth)) if config["skip_scalars"] else None
        self.head = nn.Linear(width, num_symbols, bias=False)
        nn.init.zeros_(self.head.weight)
        self.logits = nn.ModuleList(Table(n, *tables, num_symbols) for n in range(1, config["logit_ngram"] + 1))
        self.softcap: float | None = config["softcap"]
        self.dropout: float = config["dropout"]
        cos, sin = rope_tables(config["context"], config["head_dim"], config["rope_base"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, symbols_BT: Tensor) -> Tensor:
        cos, sin = self.cos[: symbols_BT.shape[1]], self.sin[: symbols_BT.shape[1]]
        x_BTD = self.embed(symbols_BT)
        for table in self.inputs:
            x_BTD = x_BTD + table(symbols_BT)
        x_BTD = start_BTD = F.dropout(rms_norm(x_BTD), self.dropout, self.training)
        for number, block in enumerate(self.blocks):
            if self.skips is not None:
                x_BTD = self.skips[number, 0] * x_BTD + self.skips[number, 1] * start_BTD
            x_BTD = block(x_BTD, symbols_BT, cos, sin)
        logits_BTV = self.head(rms_norm(x_BTD))
        for table in self.logits:
            logits_BTV = logits_BTV + table(symbols_BT)
        return logits_BTV if self.softcap is None else self.softcap * torch.tanh(logits_BTV / self.softcap)


# --- optimizers ---


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is made orthogonal (Jordan 2024), in float32, for weight matrices."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                average = state.setdefault("average", torch.zeros_like(param))
                average.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonal(param.grad.lerp(average, group["momentum"]))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"] * 0.2 * max(param.shape) ** 0.5)  # the size of an AdamW update


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrix with singular values near one, by Newton-Schulz iterations."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if is_tall else x


def make_optimizers(model: GPT, config: Config) -> list[torch.optim.Optimizer]:
    """One group a kind of parameter; every group keeps its own `peak_lr`."""
    matrices = [p for name, p in model.blocks.named_parameters() if not name.endswith("values")]
    tables = [*model.inputs.parameters(), *model.logits.parameters()]
    embeddings = [model.embed.weight, *(p for name, p in model.blocks.named_parameters() if name.endswith("values"))]
    kinds = [("table_lr", tables), ("embed_lr", embeddings), ("head_lr", [model.head.weight])]
    if model.skips is not None:
        kinds.append(("scalar_lr", [model.skips]))
    groups = [{"params": p, "lr": config["lr"] * config[name], "weight_decay": 0.0} for name, p in kinds if p]
    optimizers: list[torch.optim.Optimizer] = []
    if config["optimizer"] == "muon":
        optimizers.append(Muon(matrices, config["lr"], config["beta1"], config["weight_decay"]))
    else:
        groups.append({"params": matrices, "lr": config["lr"], "weight_decay": config["weight_decay"]})
    beta2 = 0.5 ** (config["batch_size"] * config["context"] / config["beta2_half_life"])
    optimizers.append(torch.optim.AdamW(groups, betas=(config["beta1"], beta2), eps=1e-10, fused=True))
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


# --- schedule: everything that moves is a function of the charged fraction of the budget, never of steps ---


def lr_multiplier(fraction: float, config: Config) -> float:
    """Linear warm-up, flat, then a warm-down of the chosen shape to the floor."""
    if fraction < config["warmup"]:
        return fraction / config["warmup"]
    left = 1.0 - max(0.0, (fraction - 1.0) / config["warmdown"] + 1.0) if config["warmdown"] else 1.0
    shapes = {"linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left), "sqrt": 1.0 - math.sqrt(1.0 - left)}
    return config["lr_floor"] + (1.0 - config["lr_floor"]) * shapes[config["schedule"]]


# --- charged clock ---


@dataclass
class ChargedClock:
    """Charges every step what a quiet step takes, so that a busy machine costs wall time and not steps.

    Interference only ever makes a step slower, so the 20th percentile of all steps so far is close to what a step costs
    undisturbed. The sum is taken anew once, at a tenth of the budget, when the percentile is better known.
    """

    budget_s: float
    charged_s: float = 0.0
    steps_s: list[float] = field(default_factory=list[float])
    settled: list[float] = field(default_factory=list[float])
    """Step times in order of size, without the first three, in which caches fill."""
    is_recharged: bool = False

    def add(self, step_s: float) -> None:
        self.steps_s.append(step_s)
        if len(self.steps_s) > 3:
            bisect.insort(self.settled, step_s)
        self.charged_s += self.percentile_s(0.2)
        if not self.is_recharged and self.charged_s >= 0.1 * self.budget_s:
            self.charged_s = self.percentile_s(0.2) * len(self.steps_s)
            self.is_recharged = True

    def percentile_s(self, share: float) -> float:
        times = self.settled or sorted(self.steps_s) or [0.0]
        return times[int(share * (len(times) - 1))]

    @property
    def fraction(self) -> float:
        """How much of the budget is gone at the middle of the step about to run."""
        return min(1.0, (self.charged_s + 0.5 * self.percentile_s(0.2)) / self.budget_s)


# --- training ---


class Ended(Exception):
    """Training that went wrong in a way that has a status of its own."""

    def __init__(self, status: str, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass
class Track:
    """What training leaves behind to be told."""

    uniform: float
    """Nats per symbol of knowing nothing."""
    loss_ema: float | None = None
    norms: list[float] = field(default_factory=list[float])
    curve: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    lr: float | None = None
    tokens: int = 0
    is_zero: bool = True

    def check(self, loss: float, norm: float, fraction: float) -> None:
        """Raises Ended for a step that must not reach the weights. Says `not <` where a NaN must not slip through."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Ended("nan", f"Loss {loss}, gradient norm {norm} after {len(self.norms)} steps.")
        ema = loss if self.loss_ema is None else self.loss_ema + max(0.02, 1 / (len(self.norms) + 1)) * (loss - self.loss_ema)
        if not loss < 10 * self.uniform or (fraction > 0.2 and not ema < self.uniform - 1e-3):
            raise Ended("diverged", f"Loss {loss:.4g} (mean {ema:.4g}); knowing nothing costs {self.uniform:.4g}.")
        self.loss_ema = ema
        self.norms.append(norm)
        self.is_zero = self.is_zero and loss == 0.0
        if len(self.curve) < min(64, int(fraction * 64) + 1):
            self.curve.append((round(fraction, 4), round(ema, 4)))


def train(
    model: GPT,
    optimizers: list[torch.optim.Optimizer],
    stream: Iterator[tuple[Tensor, Tensor]],
    config: Config,
    clock: ChargedClock,
    track: Track,
    now_s: Callable[[], float],
) -> None:
    """Steps until the budget is charged, half a step more or less. Raises Ended."""
    device = model.head.weight.device
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    said_s = now_s()
    while (fraction := clock.fraction) < 1.0:
        began_s = now_s()
        multiplier = lr_multiplier(fraction, config)
        for group in groups:
            group["lr"] = group["peak_lr"] * multiplier
        inputs, targets = (part.to(device, non_blocking=True) for part in next(stream))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        track.check(*torch.stack((loss.detach(), norm)).tolist(), fraction)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        track.tokens += targets.numel()
        track.lr = config["lr"] * multiplier
        ended_s = now_s()
        clock.add(ended_s - began_s)
        if ended_s - said_s > 0.5:
            said_s = ended_s
            print(json.dumps({"fraction": round(fraction, 4), "loss": track.loss_ema}), file=sys.stderr, flush=True)


def warm(model: GPT, stream: Iterator[tuple[Tensor, Tensor]], times: int = 3) -> None:
    """Fill caches and allocators. No weight, no optimizer and no random number of the run itself is touched."""
    device = model.head.weight.device
    for _ in range(times):
        inputs, targets = (part.to(device) for part in next(stream))
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    model.zero_grad(set_to_none=True)


# --- validation ---


@torch.inference_mode()
def validate(model: GPT, data: Data, split: str, context: int) -> float:
    """Nats over all targets of a split, in one fixed order.

    Every target is predicted once, from a window of text before it that is at least half a context long, whatever
    the context; the text may be of the other split, or the end of the training text, and no weight changes.
    """
    model.eval()
    device, stride, end = model.head.weight.device, context // 2, len(data.symbols)
    symbols = torch.from_numpy(data.symbols).to(device)
    firsts = torch.from_numpy(data.targets(split)).view(-1)
    firsts = firsts[(firsts - data.num_train) % stride == 0]
    total = 0.0
    for chunk in firsts.split(max(1, 8192 // context)):
        targets = chunk[:, None] + torch.arange(stride - context, stride)  # the last `stride` of them are scored
        inputs = symbols[(targets - 1).clamp(max=end - 1).to(device)]
        scored = targets[:, -stride:]
        wanted = symbols[scored.clamp(max=end - 1).to(device)]
        losses = F.cross_entropy(model(inputs)[:, -stride:].flatten(0, 1), wanted.flatten(), reduction="none")
        losses = losses + data.escape_nats * (wanted.flatten() >= data.facts["symbols"])
        total += float(losses[(scored < end).flatten().to(device)].double().sum())
    return total


# --- the machine ---


def probe_ms() -> float:
    """Milliseconds of the fastest of many small matrix products: what the machine can do at this moment."""
    one = torch.full((256, 256), 0.5)
    times_s: list[float] = []
    for _ in range(30):
        began_s = time.perf_counter()
        torch.mm(one, one)
        times_s.append(time.perf_counter() - began_s)
    return round(min(times_s) * 1e3, 4)


def pressure() -> float | None:
    """Percent of the last ten seconds in which something waited for a processor (Linux)."""
    try:
        words = Path("/proc/pressure/cpu").read_text().split()
    except OSError:
        return None
    return float(words[1].removeprefix("avg10="))


def machine(device: str, threads: int) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text()
        cpu = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), cpu)
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": platform.node(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": threads,
        "ram_gb": round(ram / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
    }


def peak_mem_mb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


# --- one run ---


@dataclass(frozen=True)
class Order:
    """What to run. The config holds axes; everything else is the harness's."""

    config: Config
    budget_s: float = 20.0
    seed_init: int = 0
    seed_data: int = 0
    data: str = "embedded"
    threads: int = 1
    device: str = "cpu"
    splits: tuple[str, ...] = ("search",)
    out: str | None = None


class Trial:
    """One run and what became of it. Later parts need the earlier ones; `result` needs none."""

    def __init__(self, order: Order, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.began_s = now_s()
        self.order, self.now_s = order, now_s
        self.config = resolve(order.config)
        self.data = load(order.data)
        self.clock = ChargedClock(order.budget_s)
        self.track = Track(math.log(self.data.num_symbols))
        self.floors = floors(self.data)
        self.seconds: dict[str, float] = {}
        self.cpu_s: float | None = None
        self.sizes: dict[str, int] = {}
        self.nats: dict[str, float] = {}
        self.failed: dict[str, str | None] = {"status": "ok", "error_class": None, "error_tail": None}
        self.probes: list[float] = []

    def run(self) -> dict[str, Any]:
        """Build, warm up, train, validate; whatever goes wrong is in the result, with all that was known by then."""
        try:
            self.carry_out()
        except Ended as end:
            self.failed = {"status": end.status, "error_class": None, "error_tail": str(end)}
        except Exception as error:  # noqa: BLE001  (a trial that fails is a result, and the study goes on)
            tail = traceback.format_exc()[-2000:]
            is_oom = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            status = "oom" if is_oom else "crash"
            self.failed = {"status": status, "error_class": type(error).__name__, "error_tail": tail}
        return self.result()

    def carry_out(self) -> None:
        torch.set_num_threads(self.order.threads)
        self.probes.append(probe_ms())
        torch.manual_seed(self.order.seed_init)
        model = GPT(self.config, self.data.num_symbols).to(self.order.device)
        self.sizes = sizes(model, self.config)
        optimizers = make_optimizers(model, self.config)
        shape = (self.config["batch_size"], self.config["context"])
        began_s = self.spent("setup_s", self.began_s)
        warm(model, batches(self.data, *shape, seed=0))
        self.spent("warm_s", began_s)
        torch.manual_seed(self.order.seed_data)  # dropout
        self.train(model, optimizers, batches(self.data, *shape, seed=self.order.seed_data))
        self.probes.append(probe_ms())
        began_s = self.now_s()
        for split in self.order.splits:
            nats = validate(model, self.data, split, self.config["context"])
            if not math.isfinite(nats):
                raise Ended("nan", f"The validation loss on {split!r} is {nats}.")
            self.nats[split] = nats
        self.spent("eval_s", began_s)

    def train(self, model: GPT, optimizers: list[torch.optim.Optimizer], stream: Iterator[tuple[Tensor, Tensor]]) -> None:
        # A collection in the middle of a step costs more than the step.
        gc.collect()
        gc.freeze()
        gc.disable()
        began_s, cpu_began_s = self.now_s(), time.process_time()
        try:
            train(model, optimizers, stream, self.config, self.clock, self.track, self.now_s)
        finally:
            self.spent("wall_s", began_s)
            self.cpu_s = time.process_time() - cpu_began_s
            gc.enable()
            gc.unfreeze()

    def spent(self, phase: str, began_s: float) -> float:
        ended_s = self.now_s()
        self.seconds[phase] = ended_s - began_s
        return ended_s

    def result(self) -> dict[str, Any]:
        """The names of `experiments.jsonl`; what is not known is null, never 0."""
        losses: dict[str, float | None] = {}
        for split in ("search", "lock"):
            num_bytes = int(self.data.bytes_of[self.data.targets(split)].sum())
            losses[split] = self.nats[split] / num_bytes if split in self.nats else None
        search, track, clock = self.data.targets("search"), self.track, self.clock
        steps, wall_s = len(track.norms), self.seconds.get("wall_s")
        return {
            **self.failed,
            "val_search_nats_per_byte": losses["search"],
            "val_search_bpb": losses["search"] / math.log(2) if losses["search"] is not None else None,
            "val_lock_nats_per_byte": losses["lock"],
            "train_loss_ema": track.loss_ema,
            "val_tokens": len(search),
            "val_bytes": int(self.data.bytes_of[search].sum()),
            "floors": self.floors,
            "budget_s": self.order.budget_s,
            "charged_s": clock.charged_s,
            **{phase: self.seconds.get(phase) for phase in ("wall_s", "setup_s", "warm_s", "eval_s")},
            "cpu_s": self.cpu_s,
            "total_s": self.now_s() - self.began_s,
            "steps": steps,
            "tokens": track.tokens,
            "tokens_per_s": track.tokens / clock.charged_s if clock.charged_s else None,
            **{f"step_ms_p{p}": clock.percentile_s(p / 100) * 1e3 if steps else None for p in (20, 50, 95)},
            "epochs": track.tokens / self.data.num_train,
            **{name: self.sizes.get(name) for name in ("params", "params_active", "flops_per_token")},
            "peak_mem_mb": peak_mem_mb(self.order.device),
            "lr_at_end": track.lr,
            **{f"grad_norm_p{p}": float(np.percentile(track.norms, p)) if steps else None for p in (50, 99)},
            "loss_curve": track.curve,
            "validity": self.validity(),
            "machine": machine(self.order.device, self.order.threads),
            "data": self.data.facts,
            "config": self.config,
        }

    def validity(self) -> dict[str, Any]:
        """Signs that the machine was disturbed, and flags for those past their limits."""
        wall_s, charged_s, probes = self.seconds.get("wall_s"), self.clock.charged_s, self.probes
        known: dict[str, Any] = {
            "wall_over_charged": wall_s / charged_s if wall_s and charged_s else None,
            "cpu_util": self.cpu_s / (wall_s * self.order.threads) if self.cpu_s and wall_s else None,
            "psi_avg10": pressure(),
            "probe_before": probes[0] if probes else None,
            "probe_after": probes[1] if len(probes) > 1 else None,
        }
        flags: list[str] = []
        if (known["wall_over_charged"] or 0.0) > 1.15:
            flags.append("wall_over_charged")
        if self.order.device == "cpu" and self.cpu_s and wall_s and self.cpu_s < 0.9 * wall_s:
            flags.append("cpu_util")
        if (known["psi_avg10"] or 0.0) > 20.0:
            flags.append("psi_avg10")
        if len(probes) > 1 and abs(probes[1] / probes[0] - 1) > 0.05:
            flags.append("probe")
        if not flags and self.clock.percentile_s(0.5) > 1.1 * self.clock.percentile_s(0.2):
            # On a quiet machine steps are alike, unless the configuration makes some of them cheap on purpose.
            flags.append("uneven_steps")
        if self.track.norms and self.track.is_zero:
            flags.append("zero_loss")
        return {**known, "flags": flags}


def sizes(model: GPT, config: Config) -> dict[str, int]:
    """Parameters; those that one token meets (a row of each table); floating-point operations of a token's training."""
    looked_up = [model.embed.weight, *(p for p in model.parameters() if p.ndim == 2 and False)]
    params = sum(p.numel() for p in model.parameters())
    return {"params": params, "params_active": params, "flops_per_token": 6 * params, "x": len(looked_up)}


# --- command line ---


def write(path: Path, text: str) -> None:
    """All of the text, or what was there before."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def parse(argv: list[str]) -> Order:
    return Order({})


def main(argv: list[str]) -> int:
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
