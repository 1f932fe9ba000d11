"""A small GPT trained from scratch for a fixed number of charged seconds: one file, one run, one JSON result.

It stands alone and reads from top to bottom (usage: `docs/gpt.md`). Suffixes: B rows, T positions, D width, V symbols.
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
import re
import resource
import sys
import time
import timeit
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# OpenMP reads it when torch is loaded; its idle threads spin without end otherwise, and slow down all beside them.
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000", **os.environ}

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Ints = np.ndarray[Any, np.dtype[np.int64]]
Config = dict[str, Any]
Stream = Iterator[tuple[Tensor, Tensor]]
Now = Callable[[], float]
BLOCK = 2048  # bytes of validation text in a row that belong to one split
BARE_MB = 330  # resident memory of Python with torch and a text of a megabyte


# --- axes: all that a configuration can say; seeds, budget and data belong to the order ---
class Axis(NamedTuple):
    """One dimension. Kind: log, linear, integer, or choice; choices that are numbers are a ladder."""

    default: Any
    kind: str
    low: Any = None
    high: Any = None
    choices: tuple[Any, ...] | None = None

    def allows(self, value: Any) -> bool:
        if self.choices is not None:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        is_number = type(value) in (int, float) and self.low <= value <= self.high
        return is_number and (self.kind != "integer" or value == int(value))


AXES: dict[str, Axis] = {
    "lr": Axis(6e-3, "log", 1e-4, 5e-2),  # of weight matrices; the other groups have multiples of it
    "warmup": Axis(0.02, "linear", 0.0, 0.3),  # fraction of the budget
    "weight_decay": Axis(0.1, "log", 1e-3, 1.0),  # of weight matrices
    "batch_size": Axis(16, "choice", choices=(4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)),  # rows
    "width": Axis(64, "choice", choices=(32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768)),
    "depth": Axis(2, "integer", 1, 12),
    "dropout": Axis(0.0, "linear", 0.0, 0.5),
    "schedule": Axis("linear", "choice", choices=("linear", "cosine", "sqrt")),  # shape of the warm-down
    "warmdown": Axis(0.6, "linear", 0.0, 1.0),  # fraction of the budget; 0 is a constant learning rate
    "lr_floor": Axis(0.05, "linear", 0.0, 0.5),  # where the warm-down ends, as a multiple of lr
    "context": Axis(64, "choice", choices=(16, 32, 64, 128, 256, 512)),  # positions; divides BLOCK
    "head_dim": Axis(32, "choice", choices=(16, 32, 64, 128)),
    "mlp_ratio": Axis(2, "integer", 1, 8),
    "rope_base": Axis(1e4, "log", 1e2, 1e6),
    "qk_norm": Axis(True, "choice", choices=(False, True)),
    "softcap": Axis(15.0, "log", 5.0, 100.0),  # no logit is larger
    "skip_scalars": Axis(True, "choice", choices=(False, True)),  # learned weights of the stream and of its start
    "value_embeddings": Axis(True, "choice", choices=(False, True)),  # on every second block, counted from the last
    "input_ngram": Axis(6, "integer", 1, 8),  # the longest n-gram with an input embedding of its own
    "table_rows": Axis(32768, "choice", choices=(4096, 8192, 16384, 32768, 65536)),  # n-grams beyond share them
    "optimizer": Axis("adamw", "choice", choices=("adamw", "muon")),  # Muon pays from 10 T D tokens in a batch
    "beta1": Axis(0.9, "linear", 0.5, 0.98),  # Muon's momentum, too
    "beta2_half_life": Axis(7e4, "log", 1e3, 1e7),  # tokens after which a squared gradient counts half
    "embed_lr": Axis(10.0, "log", 0.05, 100.0),  # multiple of lr: input and value embeddings
    "head_lr": Axis(1.0, "log", 0.05, 100.0),  # output layer
    "scalar_lr": Axis(1.0, "log", 0.05, 100.0),  # skip scalars
}


class Refused(Exception):
    """An order that cannot be carried out as it stands: exit code 2."""


def resolve(given: Config) -> Config:
    """Every axis with its value. Raises Refused for a seed, an unknown axis, and a value off its axis."""
    config = {name: axis.default for name, axis in AXES.items()}
    for name, value in given.items():
        if "seed" in name.lower():
            raise Refused(f"{name!r} in the config: a seed is no axis. Put seed_init and seed_data beside the config.")
        if name not in AXES or not AXES[name].allows(value):
            axis = AXES.get(name, f"not there. There are: {', '.join(AXES)}")
            raise Refused(f"{name} is {value!r}, but its axis is {axis}.")
        config[name] = int(value) if AXES[name].kind == "integer" else value
    return config


# --- data: the bytes of one text, nine tenths to train, one tenth to judge by ---
@dataclass(frozen=True)
class Data:
    """A text as numbers. Its alphabet is the bytes that occur in it; what comes after `num_train` is validated on."""

    symbols: Ints
    num_train: int
    num_symbols: int
    facts: dict[str, Any]

    def targets(self, split: str) -> Ints:
        """Positions that a split predicts: even blocks or odd ones, as halves of a text differ more than models do."""
        positions = np.arange(self.num_train, len(self.symbols))
        return positions[(positions - self.num_train) // BLOCK % 2 == (split == "lock")]


def load(source: str) -> Data:
    """A text file, or `embedded`: English that comes with Python. Raises OSError, and Refused for a text of no use."""
    if source == "embedded":
        from pydoc_data.topics import topics

        raw = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        source = f"pydoc_data.topics of Python {platform.python_version()}; other releases differ, compare sha256"
    else:
        raw = Path(source).read_bytes()
    if len(raw) < 20 * BLOCK:
        raise Refused(f"{source} has {len(raw)} bytes; {20 * BLOCK} are the least that give both splits text.")
    num_train = len(raw) * 9 // 10
    pieces = [raw[at : at + BLOCK] for at in range(num_train, len(raw) - BLOCK, (len(raw) - num_train) // 64 + 1)]
    if (num_known := sum(raw.find(piece, 0, num_train) >= 0 for piece in pieces)) > len(pieces) // 10:
        raise Refused(f"{source}: {num_known} of {len(pieces)} pieces to validate on are in the text to train on, too.")
    alphabet, symbols = np.unique(np.frombuffer(raw, dtype=np.uint8), return_inverse=True)
    facts = {"source": source, "sha256": hashlib.sha256(raw).hexdigest(), "symbols": len(alphabet)}
    facts |= {"train_chars": num_train, "val_chars": len(raw) - num_train}
    return Data(symbols.astype(np.int64), num_train, len(alphabet), facts)


def batches(data: Data, rows: int, context: int, seed: int) -> Stream:
    """Inputs and targets [B, T] for ever; an epoch shows every window of a tiling with a random start once."""
    rng = np.random.default_rng(seed)
    train = torch.from_numpy(data.symbols[: data.num_train])
    while True:
        order = rng.permutation(np.arange(rng.integers(context), data.num_train - context, context))
        for at in range(0, len(order) - rows + 1, rows):
            window = train[torch.from_numpy(order[at : at + rows])[:, None] + torch.arange(context + 1)]
            yield window[:, :-1], window[:, 1:]


# --- floors: what counting n-grams of the training text gets ---
def floors(data: Data) -> dict[str, float]:
    """Nats per byte of the validation text, by the length of the n-grams, under interpolated Witten-Bell counts:
    P(symbol | context) = (count + kinds * P(symbol | shorter context)) / (total + kinds)."""
    base, val = data.num_symbols, slice(data.num_train, None)
    p = np.full(len(data.symbols) - data.num_train, 1.0 / base)
    result: dict[str, float] = {}
    contexts = np.zeros_like(data.symbols)  # the symbols before each position, as one number
    for n, name in enumerate(("unigram", "bigram", "trigram", "4gram", "5gram")):
        if n:
            contexts[n:] += data.symbols[:-n] * base ** (n - 1)
        grams = contexts * base + data.symbols
        seen = np.sort(grams[n : data.num_train])
        total = count(seen // base, contexts[val])
        kinds = count(np.unique(seen) // base, contexts[val])
        p = np.where(total > 0, (count(seen, grams[val]) + kinds * p) / np.maximum(total + kinds, 1), p)
        result[name] = float(-np.log(p).mean())
    return result


def count(ordered: Ints, wanted: Ints) -> Ints:
    return np.searchsorted(ordered, wanted, side="right") - np.searchsorted(ordered, wanted, side="left")


# --- model ---
def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each position's halves of the channels by its angles [2, T, channels / 2]: products depend on distance."""
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * turns[0] - two * turns[1], one * turns[1] + two * turns[0]), dim=-1)


class NGrams(nn.Module):
    """The sum of a learned row for each n-gram, up to the longest, that ends at a position. [B, T] -> [B, T, D]"""

    def __init__(self, longest: int, num_symbols: int, max_rows: int, width: int) -> None:
        super().__init__()
        self.base = num_symbols + 1  # before a window stands a symbol of its own
        self.num_rows = [min(self.base**length, max_rows) for length in range(1, longest + 1)]
        self.weight = nn.Parameter(torch.zeros(sum(self.num_rows), width))
        nn.init.normal_(self.weight[: self.base])  # single symbols; all else begins at zero

    def forward(self, symbols_BT: Tensor) -> Tensor:
        grams, first, rows = symbols_BT, 0, list[Tensor]()
        for back, num_rows in enumerate(self.num_rows):
            if back:
                grams = grams * self.base + F.pad(symbols_BT, (back, 0), value=self.base - 1)[:, :-back]
            are_too_many = self.base ** (back + 1) > num_rows  # then a product's middle bits deal them out to the rows
            rows.append(first + ((grams * 0x9E3779B1 >> 15) % num_rows if are_too_many else grams))
            first += num_rows
        # With sparse gradients a step costs the same however many rows there are.
        bags = torch.stack(rows, dim=-1).flatten(0, 1)
        return F.embedding_bag(bags, self.weight, mode="sum", sparse=True).unflatten(0, symbols_BT.shape)


class Block(nn.Module):
    """Attention, then a ReLU² MLP; each reads the normalized stream and adds to it."""

    def __init__(self, config: Config, num_symbols: int, has_values: bool) -> None:
        super().__init__()
        width, hidden, self.head_dim = config["width"], config["mlp_ratio"] * config["width"], config["head_dim"]
        self.inner = max(1, width // self.head_dim) * self.head_dim
        self.qk_norm, self.dropout = bool(config["qk_norm"]), float(config["dropout"])
        self.qkv, self.out = nn.Linear(width, 3 * self.inner, bias=False), nn.Linear(self.inner, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.values = nn.Parameter(torch.zeros(num_symbols, self.inner)) if has_values else None
        for last in (self.out, self.down):
            nn.init.zeros_(last.weight)

    def forward(self, x_BTD: Tensor, symbols_BT: Tensor, turns: Tensor) -> Tensor:
        qk, v = self.qkv(F.rms_norm(x_BTD, x_BTD.shape[-1:])).split((2 * self.inner, self.inner), dim=-1)
        if self.values is not None:
            v = v + F.embedding(symbols_BT, self.values)
        qk, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (qk, v))
        qk = rotate(qk, turns)
        q, k = (F.rms_norm(qk, qk.shape[-1:]) if self.qk_norm else qk).chunk(2, dim=1)
        attended = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x_BTD = x_BTD + F.dropout(attended, self.dropout, self.training)
        hidden = F.relu(self.up(F.rms_norm(x_BTD, x_BTD.shape[-1:]))).square()
        return x_BTD + F.dropout(self.down(hidden), self.dropout, self.training)


class GPT(nn.Module):
    """Logits of the next symbol. [B, T] -> [B, T, V]"""

    def __init__(self, config: Config, num_symbols: int) -> None:
        super().__init__()
        width, depth, has_values = config["width"], config["depth"], config["value_embeddings"]
        self.softcap, self.dropout = float(config["softcap"]), float(config["dropout"])
        self.inputs = NGrams(config["input_ngram"], num_symbols, config["table_rows"], width)
        self.blocks = nn.ModuleList(Block(config, num_symbols, has_values and (depth - i) % 2) for i in range(depth))
        self.skips = nn.Parameter(torch.tensor([[1.0, 0.0]] * depth)) if config["skip_scalars"] else None
        self.head = nn.Linear(width, num_symbols, bias=False)
        nn.init.zeros_(self.head.weight)
        speeds = config["rope_base"] ** -(torch.arange(0, config["head_dim"], 2) / config["head_dim"])
        angles = torch.arange(config["context"])[:, None] * speeds
        self.turns = nn.Buffer(torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, symbols_BT: Tensor) -> Tensor:
        x_BTD = self.inputs(symbols_BT)
        x_BTD = start_BTD = F.dropout(F.rms_norm(x_BTD, x_BTD.shape[-1:]), self.dropout, self.training)
        for number, block in enumerate(self.blocks):
            if self.skips is not None:
                x_BTD = self.skips[number, 0] * x_BTD + self.skips[number, 1] * start_BTD
            x_BTD = block(x_BTD, symbols_BT, self.turns[:, : symbols_BT.shape[1]])
        return self.softcap * torch.tanh(self.head(F.rms_norm(x_BTD, x_BTD.shape[-1:])) / self.softcap)


def sizes(model: GPT, config: Config) -> dict[str, int]:
    """Parameters, those that one token meets, operations of training on a token, and memory, by docs/gpt.md."""
    rows = [p for name, p in model.named_parameters() if name.endswith(("inputs.weight", "values"))]
    params = sum(p.numel() for p in model.parameters())
    multiplied = params - sum(p.numel() for p in rows)  # of rows a token only reads some
    active = multiplied + sum(p.shape[1] for p in rows) + config["width"] * (config["input_ngram"] - 1)
    inner = max(1, config["width"] // config["head_dim"]) * config["head_dim"]
    # Numbers kept of a token for the backward pass; and of a parameter four: value, gradient, two moments.
    kept = config["depth"] * ((8 + 3 * config["mlp_ratio"]) * config["width"] + 9 * inner) + 4 * model.head.out_features
    memory_mb = BARE_MB + 4 * (4 * params + kept * config["batch_size"] * config["context"]) / 2**20
    flops = 6 * (multiplied + config["depth"] * inner * config["context"])
    return {"params": params, "params_active": active, "flops_per_token": flops, "expected_mem_mb": round(memory_mb)}


# --- optimizers ---
def make_optimizers(model: GPT, config: Config) -> list[torch.optim.Optimizer]:
    """One group for each kind of parameter; each remembers its `peak_lr`."""
    params = dict(model.named_parameters())
    rows = params.pop("inputs.weight")
    groups: list[dict[str, Any]] = []
    for ending, axis in (("values", "embed_lr"), ("head.weight", "head_lr"), ("skips", "scalar_lr")):
        own = [params.pop(name) for name in list(params) if name.endswith(ending)]
        groups.append({"params": own, "lr": config["lr"] * config[axis]})
    matrices = {"params": list(params.values()), "lr": config["lr"], "weight_decay": config["weight_decay"]}
    betas = (config["beta1"], 0.5 ** (config["batch_size"] * config["context"] / config["beta2_half_life"]))
    optimizers: list[torch.optim.Optimizer] = []
    if config["optimizer"] == "muon":  # its steps are made as long as those of AdamW, so that one lr serves both
        optimizers.append(torch.optim.Muon([matrices], momentum=betas[0], adjust_lr_fn="match_rms_adamw"))
    else:
        groups.append(matrices)
    optimizers.append(torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, weight_decay=0.0, fused=True))
    optimizers.append(torch.optim.SparseAdam([rows], lr=config["lr"] * config["embed_lr"], betas=betas))
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


# --- schedule and clock: what moves is a function of the charged fraction of the budget, never of steps ---
def lr_multiplier(fraction: float, config: Config) -> float:
    """Linear warm-up, flat, then a warm-down of the chosen shape to the floor."""
    if fraction < config["warmup"]:
        return fraction / config["warmup"]
    left = min(1.0, (1.0 - fraction) / config["warmdown"]) if config["warmdown"] else 1.0
    shapes = {"linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left), "sqrt": 1.0 - math.sqrt(1.0 - left)}
    return config["lr_floor"] + (1.0 - config["lr_floor"]) * shapes[config["schedule"]]


@dataclass
class ChargedClock:
    """Charges a step what a quiet step takes, so that a busy machine costs wall time and not steps. Interference only
    makes steps slower, so the 20th percentile of all so far is near what an undisturbed one takes."""

    budget_s: float
    charged_s: float = 0.0
    num_steps: int = 0
    ordered_s: list[float] = field(default_factory=list[float])
    is_recharged: bool = False

    def add(self, step_s: float) -> None:
        self.num_steps += 1
        if self.num_steps == 4:
            self.ordered_s.clear()  # caches were filling
        bisect.insort(self.ordered_s, step_s)
        self.charged_s += self.percentile_s(20)
        # Once, when the percentile is better known, the sum is made anew; from there it only grows.
        if not self.is_recharged and self.charged_s >= 0.1 * self.budget_s and self.num_steps > 20:
            self.charged_s, self.is_recharged = self.percentile_s(20) * self.num_steps, True

    def percentile_s(self, percent: float) -> float:
        return self.ordered_s[int(percent / 100 * (len(self.ordered_s) - 1))] if self.ordered_s else 0.0

    @property
    def fraction(self) -> float:
        """How much of the budget is gone in the middle of the step about to run."""
        return min(1.0, (self.charged_s + 0.5 * self.percentile_s(20)) / self.budget_s)


# --- training ---
class Ended(Exception):
    """A run that went wrong in a way that has a status of its own. Arguments: the status, and why."""


@dataclass
class Track:
    """What training leaves behind to be told. `uniform`: nats a symbol of knowing nothing."""

    uniform: float
    loss_ema: float | None = None
    norms: list[float] = field(default_factory=list[float])
    curve: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def check(self, loss: float, norm: float, fraction: float) -> None:
        """Raises Ended for a step that must not reach the weights; `not <` also holds for a NaN, `>=` does not."""
        if not (math.isfinite(loss) and (math.isfinite(norm) or loss > 10 * self.uniform)):
            raise Ended("nan", f"Loss {loss} and gradient norm {norm} after {len(self.norms)} steps. Lower lr.")
        weight = max(0.02, 1 / (len(self.norms) + 1))
        ema = loss if self.loss_ema is None else self.loss_ema + weight * (loss - self.loss_ema)
        is_late = fraction > 0.2 and len(self.norms) > 20
        if not loss < 10 * self.uniform or (is_late and not ema < self.uniform - 1e-3):
            raise Ended("diverged", f"Loss {loss:.4g}, mean {ema:.4g}; knowing nothing costs {self.uniform:.4g}.")
        self.loss_ema = ema
        self.norms.append(norm)
        if len(self.curve) < min(64, int(fraction * 64) + 1):
            self.curve.append((round(fraction, 4), round(ema, 4)))


def train(model: GPT, stream: Stream, config: Config, clock: ChargedClock, track: Track, now_s: Now) -> None:
    """Steps until the budget is charged, give or take half a step. Raises Ended."""
    optimizers, said_s = make_optimizers(model, config), now_s()
    dense = [param for name, param in model.named_parameters() if name != "inputs.weight"]
    while (fraction := clock.fraction) < 1.0:
        began_s = now_s()
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak_lr"] * lr_multiplier(fraction, config)
        loss = loss_of(model, stream)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in dense if p.grad is not None])
        track.check(loss.item(), norm.item(), fraction)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ended_s = now_s()
        clock.add(ended_s - began_s)
        if ended_s - said_s > 0.5:
            said_s = ended_s
            print(json.dumps({"fraction": round(fraction, 4), "loss": track.loss_ema}), file=sys.stderr, flush=True)


def loss_of(model: GPT, stream: Stream) -> Tensor:
    inputs, targets = (part.to(model.head.weight.device) for part in next(stream))
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


# --- validation, and the machine that it runs on ---
@torch.inference_mode()
def validate(model: GPT, data: Data, split: str, context: int) -> float:
    """Nats per byte over all targets of a split, in a fixed order; no weight changes. Each is predicted once, from at
    least half a context of the text before it, whichever split that is of."""
    model.eval()
    device, stride, last = model.head.weight.device, context // 2, len(data.symbols) - 1
    symbols, targets = torch.from_numpy(data.symbols), torch.from_numpy(data.targets(split))
    firsts = targets[(targets - data.num_train) % stride == 0]
    total = 0.0
    for chunk in firsts.split(max(1, 8192 // context)):
        window = chunk[:, None] + torch.arange(stride - context, stride)  # of these, the last `stride` are scored
        logits = model(symbols[(window - 1).clamp(max=last)].to(device))[:, -stride:]
        scored = window[:, -stride:]
        wanted = torch.where(scored <= last, symbols[scored.clamp(max=last)], -100)  # cross_entropy passes over -100
        losses = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten().to(device), reduction="none")
        total += losses.sum(dtype=torch.float64).item()
    return total / len(targets)


def probe_ms() -> float:
    """Milliseconds of the fastest of many small matrix products: what the machine can do at this moment."""
    matrix = torch.full((256, 256), 0.5)
    return min(timeit.repeat(lambda: torch.mm(matrix, matrix), number=1, repeat=30)) * 1e3


def text_of(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def machine(device: str, threads: int) -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", text_of("/proc/cpuinfo"))
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": platform.node(), "os": platform.platform(), "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(), "threads": threads, "ram_gb": round(ram_bytes / 2**30, 1), "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None, "python": platform.python_version(),
    }  # fmt: skip


# --- one run ---
@dataclass(frozen=True)
class Order:
    """What to run. The config holds axes; all else belongs to whoever orders."""

    config: Config = field(default_factory=Config)
    budget_s: float = 20.0
    seed_init: int = 0
    seed_data: int = 0
    data: str = "embedded"
    threads: int = 1
    device: str = "cpu"
    splits: tuple[str, ...] | list[str] = ("search",)
    out: str | None = None


class Trial:
    """One run, and all that is known of it so far. Raises Refused for an order that makes no sense."""

    def __init__(self, order: Order, now_s: Now = time.perf_counter) -> None:
        self.order, self.now_s, self.began_s = order, now_s, now_s()
        is_here = order.device == "cpu" or (order.device == "cuda" and torch.cuda.is_available())
        if order.budget_s <= 0 or order.threads < 1 or not is_here or not set(order.splits) <= {"search", "lock"}:
            raise Refused("Wanted: budget_s above 0, threads from 1, a device that is here, splits 'search' or 'lock'.")
        self.config, self.data = resolve(order.config), load(order.data)
        if self.data.num_train < (self.config["batch_size"] + 2) * self.config["context"]:
            raise Refused(f"{self.data.num_train} bytes do not fill a batch. Lower batch_size or context.")
        self.floors = {"uniform": math.log(self.data.num_symbols)}
        self.clock, self.track = ChargedClock(order.budget_s), Track(self.floors["uniform"])
        self.end: dict[str, str | None] = {"status": "ok", "error_class": None, "error_tail": None}
        self.seconds: dict[str, float | None] = dict.fromkeys(("setup_s", "warm_s", "wall_s", "cpu_s", "eval_s"))
        self.sizes: dict[str, Any] = dict.fromkeys(("params", "params_active", "flops_per_token", "expected_mem_mb"))
        self.losses, self.probes = dict[str, float](), list[float]()

    def run(self) -> dict[str, Any]:
        """Build, warm up, train, validate. What goes wrong is in the result, beside all that was known by then."""
        try:
            self.carry_out()
        except Ended as end:
            self.end["status"], self.end["error_tail"] = end.args
        except Exception as error:  # noqa: BLE001  (whatever fails in a trial is its result)
            is_oom = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            self.end = {"status": "oom" if is_oom else "crash", "error_class": type(error).__name__}
            self.end["error_tail"] = traceback.format_exc()[-2000:]
        return self.result()

    def carry_out(self) -> None:
        config, order = self.config, self.order
        shape = (config["batch_size"], config["context"], order.seed_data)
        with self.phase("setup_s"):
            torch.set_num_threads(order.threads)
            torch.manual_seed(order.seed_init)
            model = GPT(config, self.data.num_symbols).to(order.device)
            self.sizes |= sizes(model, config)
            self.floors |= floors(self.data)
        with self.phase("warm_s"):  # caches fill, no weight moves, and training begins with the same batches again
            stream = batches(self.data, *shape)
            for _ in range(3):
                loss_of(model, stream).backward()
            model.zero_grad()
        gc.freeze()  # else a collection takes longer than a step
        torch.manual_seed(order.seed_data)  # of dropout
        self.probes.append(probe_ms())
        with self.phase("wall_s"), self.phase("cpu_s", time.process_time):
            train(model, batches(self.data, *shape), config, self.clock, self.track, self.now_s)
        self.probes.append(probe_ms())
        with self.phase("eval_s"):
            for split in order.splits:
                loss = validate(model, self.data, split, config["context"])
                if not math.isfinite(loss):
                    raise Ended("nan", f"The loss on the validation split {split!r} is {loss}.")
                self.losses[split] = loss

    @contextlib.contextmanager
    def phase(self, name: str, now_s: Now | None = None) -> Generator[None]:
        began_s = (now_s or self.now_s)()
        try:
            yield
        finally:
            self.seconds[name] = (now_s or self.now_s)() - began_s

    def result(self) -> dict[str, Any]:
        """What is known, under the names of `experiments.jsonl`; what is not known is null."""
        clock, track, search = self.clock, self.track, self.losses.get("search")
        num_val, steps = len(self.data.targets("search")), len(track.norms)
        tokens = steps * self.config["batch_size"] * self.config["context"]
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {
            **self.end,
            "val_search_nats_per_byte": search, "val_lock_nats_per_byte": self.losses.get("lock"),
            "val_search_bpb": None if search is None else search / math.log(2),
            "train_loss_ema": track.loss_ema, "loss_curve": track.curve, "floors": self.floors,
            "val_tokens": num_val, "val_bytes": num_val, "epochs": tokens / self.data.num_train,
            "budget_s": self.order.budget_s, "charged_s": clock.charged_s, **self.seconds,
            "total_s": self.now_s() - self.began_s, "steps": steps, "tokens": tokens,
            "tokens_per_s": tokens / clock.charged_s if clock.charged_s else None,
            **{f"step_ms_p{p}": clock.percentile_s(p) * 1e3 if steps else None for p in (20, 50, 95)},
            **{f"grad_norm_p{p}": float(np.percentile(track.norms, p)) if steps else None for p in (50, 99)},
            "lr_at_end": self.config["lr"] * lr_multiplier(clock.fraction, self.config) if steps else None,
            "peak_mem_mb": (torch.cuda.max_memory_allocated() if self.order.device == "cuda" else resident) / 2**20,
            **self.sizes, "validity": self.validity(), "machine": machine(self.order.device, self.order.threads),
            "data": self.data.facts, "config": self.config,
        }  # fmt: skip

    def validity(self) -> dict[str, Any]:
        """Signs of a disturbed machine, and flags for those past their limits."""
        wall_s, cpu_s = self.seconds["wall_s"] or math.nan, self.seconds["cpu_s"] or math.nan
        before, after = (*self.probes, math.nan, math.nan)[:2]
        pressure = re.search(r"some avg10=([\d.]+)", text_of("/proc/pressure/cpu"))
        over, waiting = wall_s / (self.clock.charged_s or math.nan), float(pressure[1]) if pressure else math.nan
        numbers = {"wall_over_charged": over, "cpu_util": cpu_s / wall_s / self.order.threads, "psi_avg10": waiting}
        numbers |= {"probe_before": before, "probe_after": after}
        signs = {  # what is not known is NaN, which is on no side of a limit
            "wall_over_charged": over > 1.15, "cpu_util": cpu_s / wall_s < 0.9 and self.order.device == "cpu",
            "psi_avg10": waiting > 20.0, "probe": abs(after / before - 1.0) > 0.05,
            "zero_loss": self.track.loss_ema is not None and self.track.loss_ema < 1e-6,
        }  # fmt: skip
        flags = [name for name, is_set in signs.items() if is_set]
        if not flags and self.clock.percentile_s(50) > 1.1 * self.clock.percentile_s(20):
            flags = ["uneven_steps"]  # not the machine's doing, so the configuration makes some steps cheap
        return {name: None if math.isnan(number) else number for name, number in numbers.items()} | {"flags": flags}


def assignment(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value) if re.fullmatch(r"[-+.\deE]*\d[-+.\deE]*|true|false", value) else value


def main(argv: list[str]) -> int:
    """Exit code 0 once there is a result, whatever its status; 2 for an order that is refused."""
    parser = argparse.ArgumentParser(prog="python -m hotlap.research.gpt", description=__doc__)
    parser.add_argument("order", nargs="?", metavar="ORDER.json", help="an order; or give it in flags:")
    parser.add_argument("--set", type=assignment, action="append", dest="config", metavar="AXIS=VALUE", default=[])
    for name, kind in (("budget_s", float), ("data", str), ("threads", int), ("device", str), ("out", str)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(Order, name))
    parser.add_argument("--axes", action="store_true", help="print all axes as JSON, and end")
    parser.add_argument("--sizes", action="store_true", help='read {"data", "configs"}, print the size of each, end')
    flags = vars(parser.parse_args(argv))
    path, flags["config"] = flags.pop("order"), dict(flags["config"])
    if flags.pop("axes"):
        print(json.dumps({name: axis._asdict() for name, axis in AXES.items()}))
        return 0
    try:
        if flags.pop("sizes"):
            asked = json.load(sys.stdin)
            num_symbols, configs = load(asked["data"]).num_symbols, [resolve(config) for config in asked["configs"]]
            with torch.device("meta"):
                print(json.dumps([sizes(GPT(config, num_symbols), config) for config in configs]))
            return 0
        given: Config = json.loads(Path(path).read_text()) if path else flags
        if unknown := given.keys() - Order.__annotations__:
            raise Refused(f"An order has no {', '.join(unknown)}. It has: {', '.join(Order.__annotations__)}.")
        trial = Trial(Order(**given))
    except (Refused, OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = json.dumps(trial.run(), allow_nan=False)
    print(result, flush=True)
    if trial.order.out:
        part = Path(f"{trial.order.out}.part")
        part.write_text(result)
        part.replace(trial.order.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
