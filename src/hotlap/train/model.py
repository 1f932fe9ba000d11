"""The base model with its adapter: load, attach LoRA, name its parameters, save as standard PEFT."""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save

from hotlap.config import LoraConfig
from hotlap.config_techniques import TechniquesConfig, chunk_positions
from hotlap.errors import AuditFailed, ConfigError
from hotlap.train import attention, machine, targets
from hotlap.train.base import load_base
from hotlap.train.fused import Group, fuse
from hotlap.train.loss import Head
from hotlap.train.masks import FULL, SLIDING, as_summands, masks_of, positions_of, sliding_window_of
from hotlap.train.optim import Named
from hotlap.train.prepacked import Layouts, prepack

__all__ = ["AdaptedModel", "attach_lora", "load_base"]

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_PLAIN = TechniquesConfig()
_ROUNDING = 0.1

# B rows, T positions, D model width, N positions that predict, V vocabulary


class AdaptedModel:
    """A base model with LoRA, its trainable parameters under the names they have in the saved adapter.

    `parameters` has each of them once, `saved` tied ones under each of their names, as PEFT reads and writes them.
    """

    def __init__(
        self,
        peft_model: PeftModel,
        neftune_alpha: float | None = None,
        techniques: TechniquesConfig = _PLAIN,
        groups: Sequence[Group] = (),
    ) -> None:
        """`groups`: what `fuse` made of its modules."""
        self.peft_model = peft_model
        self._groups = groups
        causal_lm: Any = peft_model.get_base_model()
        self._text_config: Any = causal_lm.config.get_text_config()
        self._decoder: torch.nn.Module = causal_lm.get_decoder()
        self._lm_head: torch.nn.Module = causal_lm.get_output_embeddings()
        self._dtype: torch.dtype = causal_lm.dtype
        self.device: torch.device = causal_lm.device
        self._window = sliding_window_of(self._text_config)
        self._logit_scale = logit_scale_of(self._text_config)
        self.loss_chunk = chunk_positions(self._text_config.vocab_size) if techniques.chunked_loss else None
        self.saved: Named = _named_as_saved(peft_model)
        last = {id(parameter): name for name, parameter in sorted(self.saved.items())}
        self.parameters: Named = {name: self.saved[name] for name in sorted(last.values())}
        self._lengths_BT: torch.Tensor | None = None
        self._kernel = "mask"
        if neftune_alpha is not None:
            self._neftune_alpha = neftune_alpha
            causal_lm.get_input_embeddings().register_forward_hook(self._with_noise)

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder's layers, from the input to the output; none where its family calls them otherwise."""
        return list(getattr(self._decoder, "layers", ()))

    @property
    def layers_share(self) -> bool:
        """Whether layers take keys and values from others below them, as Gemma 4's upper ones do."""
        return bool(getattr(self._text_config, "num_kv_shared_layers", 0))

    @property
    def starts_from_base(self) -> bool:
        """Whether the adapter's first values were taken out of the base's weights."""
        return self.peft_model.peft_config["default"].init_lora_weights == "pissa"  # pyright: ignore

    @property
    def scale(self) -> float:
        """What an adapter's update is multiplied with."""
        settings: Any = self.peft_model.peft_config["default"]
        return settings.lora_alpha / (math.sqrt(settings.r) if settings.use_rslora else settings.r)

    @property
    def has_grown(self) -> bool:
        """Whether rows for added tokens are part of the adapter."""
        return self.peft_model.peft_config["default"].trainable_token_indices is not None  # pyright: ignore

    def hidden(self, tokens_BT: torch.Tensor, segments_BT: torch.Tensor) -> torch.Tensor:
        """Last hidden states `[B, T, D]`. A token sees only earlier ones of its own example, and in layers with a
        sliding window no more than that of them; positions restart."""
        segments_BT = segments_BT.cpu()  # where a batch has them: finding places there makes no device answer
        positions_BT = positions_of(segments_BT)
        if self._kernel in attention.FLAT:
            flat = attention.flatten(segments_BT, positions_BT, self.device)
            self._lengths_BT = flat.lengths_1N
            return flat.spread(self._decoded(flat.gathered(tokens_BT), flat.arguments_for(self._kernel)))
        segments_BT, positions_BT = (each.to(self.device, non_blocking=True) for each in (segments_BT, positions_BT))
        self._lengths_BT = (segments_BT[:, :, None] == segments_BT[:, None, :]).sum(dim=-1)
        mask = self._flex_mask(segments_BT) if self._kernel == "flex" else self._mask(segments_BT)
        return self._decoded(tokens_BT, {"attention_mask": mask, "position_ids": positions_BT})

    def _decoded(self, tokens_BT: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        with self.autocast():
            return self._decoder(input_ids=tokens_BT, use_cache=False, **arguments).last_hidden_state

    def _mask(self, segments_BT: torch.Tensor) -> Any:
        mask = masks_of(segments_BT, self._window)
        return as_summands(mask, self._dtype) if self._text_config._attn_implementation == "eager" else mask

    def _flex_mask(self, segments_BT: torch.Tensor) -> Any:
        if self._window is None:
            return attention.flex_mask(segments_BT)
        near = attention.flex_mask(segments_BT, self._window.size)
        return near if self._window.is_everywhere else {FULL: attention.flex_mask(segments_BT), SLIDING: near}

    def forget(self) -> None:
        """Let go of what a pass that was broken off has computed."""
        for group in self._groups:
            group.forget()

    def use_kernel(self, kernel: str) -> None:
        """Attend with a kernel of `attention.IMPLEMENTATIONS` instead of with a mask.

        Raises:
            ConfigError: it does not work here, or is not seen to keep examples apart; a mask does it as before.
        """
        causal_lm: Any = self.peft_model.get_base_model()
        before = causal_lm.config._attn_implementation

        def is_apart() -> bool:
            causal_lm.set_attn_implementation(attention.IMPLEMENTATIONS[kernel])
            self._kernel = kernel
            return attention.keeps_examples_apart(self.hidden, self.device)

        if (problem := self._problem(is_apart)) is None:
            return
        causal_lm.set_attn_implementation(before)
        self._kernel = "mask"
        raise ConfigError(f"Attention kernel {kernel!r} {problem}. Set slice.attention_kernel = 'mask'.")

    def require_mask(self) -> None:
        """
        Raises:
            ConfigError: this model does not heed a mask that says who sees whom.
        """
        if problem := self._problem(lambda: attention.heeds_mask(self.hidden, self.device)):
            raise ConfigError(f"{self._cannot} A mask {problem}. Take a model of another family.")

    def require_stock_logits(self) -> None:
        """
        Raises:
            ConfigError: this model makes other logits of a row than those that are trained here.
        """
        tokens_1T = torch.arange(13, device=self.device)[None] % 11

        def is_same() -> bool:
            with torch.no_grad(), self.autocast():
                stock_1TV = self.peft_model(input_ids=tokens_1T, use_cache=False).logits.float()
                odd_1TV = self.logits(self.hidden(tokens_1T, torch.ones_like(tokens_1T))) - stock_1TV
            # One that computes no numbers is for the first step to tell.
            return not float(odd_1TV.norm() / stock_1TV.norm()) > _ROUNDING

        if problem := self._problem(is_same, "gives other logits than its output head makes of its hidden states"):
            raise ConfigError(f"{self._cannot} The model {problem}. Take one of another family.")

    @property
    def _cannot(self) -> str:
        return f"{type(self.peft_model.get_base_model()).__name__} cannot be trained here."

    def _problem(
        self, holds: Callable[[], bool], if_not: str = "is not seen to keep examples of a row apart"
    ) -> str | None:
        """Why something is not known to hold of the model, as if it answered, in words, or None."""
        was_training = self.peft_model.training
        self.peft_model.eval()
        try:
            return None if holds() else if_not
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  (a model that nobody tried here fails in any way)
            return f"does not work here: {str(error).partition(chr(10))[0]}"
        finally:
            self.peft_model.train(was_training)

    @property
    def head(self) -> Head:
        trained = tuple(parameter for parameter in self._lm_head.parameters() if parameter.requires_grad)
        return Head(self._uncapped, trained, getattr(self._text_config, "final_logit_softcapping", None))

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """`[..., V]` in float32, with the model's soft cap."""
        return self.head.logits(hidden_ND)

    def _uncapped(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            logits_NV = self._lm_head(hidden_ND)
            return logits_NV if self._logit_scale == 1.0 else logits_NV * self._logit_scale

    def recompute_activations(self) -> None:
        """Keep no activations of a layer; compute them again in the backward pass, random numbers included."""
        with warnings.catch_warnings():
            # transformers 5.24 renames it; the old name is the one that every version we allow has.
            warnings.filterwarnings("ignore", category=FutureWarning)
            causal_lm: Any = self.peft_model.get_base_model()
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def adapter_config_json(self) -> bytes:
        """PEFT's `adapter_config.json`, sets in order so that the same adapter gives the same bytes."""
        return config_json(self.peft_model.peft_config["default"].to_dict())

    def autocast(self) -> AbstractContextManager[Any]:
        """The adapter is float32 whatever the base is, so products are made in the base's precision."""
        return torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32)

    def _with_noise(self, _module: torch.nn.Module, _given: Any, output_BTD: torch.Tensor) -> torch.Tensor:
        """NEFTune: uniform noise of at most alpha / sqrt(example's length x D), packed or not (arXiv 2310.05914)."""
        if not self.peft_model.training:
            return output_BTD
        assert self._lengths_BT is not None
        most_BT = self._neftune_alpha / (self._lengths_BT * output_BTD.shape[-1]).sqrt()
        noise_BTD = torch.empty_like(output_BTD).uniform_(-1.0, 1.0)
        return output_BTD + noise_BTD * most_BT[:, :, None].to(output_BTD.dtype)


def logit_scale_of(text_config: Any) -> float:
    """What logits are multiplied with behind the output head: Cohere says so, and Granite by what they are divided."""
    scale: float | None = getattr(text_config, "logit_scale", None)
    divisor: float | None = getattr(text_config, "logits_scaling", None)
    return (scale or 1.0) / (divisor or 1.0)


def config_json(fields: dict[str, Any]) -> bytes:
    fields["inference_mode"] = True
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}
    return (json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n").encode()


def attach_lora(
    base: torch.nn.Module,
    config: LoraConfig,
    seed: int,
    base_name: str,
    neftune_alpha: float | None = None,
    new_rows: list[int] | None = None,
    techniques: TechniquesConfig = _PLAIN,
) -> AdaptedModel:
    """A new adapter, drawn from `seed`, that changes nothing before the first step. Its parameters are float32, unless
    `techniques.adapter_precision` is the model's.

    `new_rows` are embedding rows of added tokens, which are trained as well.

    Raises:
        ConfigError: a name in `target_modules` is no linear module of this model's decoder, or one in
            `modules_to_save` no module of it.
    """
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        target_modules=targets.modules_of(base, config),
        use_rslora=config.rslora,
        use_dora=config.dora,
        init_lora_weights="pissa" if config.init == "pissa" else True,
        modules_to_save=targets.saved_whole(base, config),
        trainable_token_indices=targets.trained_rows(base, new_rows) if new_rows else None,  # pyright: ignore[reportArgumentType]
        ensure_weight_tying=bool(targets.tied_names(base) & set(config.modules_to_save)),
        task_type="CAUSAL_LM",
    )
    base.name_or_path = base_name  # type: ignore[assignment]  (where peft takes it from)
    machine.seed(seed)
    try:
        with warnings.catch_warnings():
            # peft 0.21 asks transformers 5.24 by a name that is going away; the user can do nothing about it.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            model = get_peft_model(base, peft_config)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ConfigError(f"lora.target_modules = {config.target_modules!r} does not fit this model: {error}") from None
    assert isinstance(model, PeftModel)
    of_base: Any = model.get_base_model().dtype
    precision = torch.float32 if techniques.adapter_precision == "float32" else of_base
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(precision)
    layouts = Layouts() if techniques.prepacked_weights else None
    groups = fuse(model, layouts) if techniques.fused_projections else []
    if layouts is not None:
        prepack(model, [linear for group in groups for linear in group.plain], layouts)
    return AdaptedModel(model, neftune_alpha, techniques, groups)


def _named_as_saved(model: PeftModel) -> Named:
    """Trainable parameters by their saved names; what is saved is told by where it lies in memory, since PEFT's names
    follow from the method."""
    # Left to itself, PEFT asks the hub whether the embeddings were resized; of those we train the new rows only.
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    trained = {parameter.data_ptr(): parameter for parameter in model.parameters() if parameter.requires_grad}
    odd = sorted(name for name, tensor in saved.items() if tensor.data_ptr() not in trained)
    named = {name: trained[tensor.data_ptr()] for name, tensor in saved.items() if name not in odd}
    if odd or len(set(map(id, named.values()))) != len(trained):
        raise AuditFailed(f"PEFT would save other tensors than are trained: {len(named)}, {len(trained)}, {odd[:4]}.")
    return named


def save_tensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """safetensors bytes; the same tensors give the same bytes."""
    return save({name: tensors[name].contiguous() for name in sorted(tensors)}, metadata={"format": "pt"})


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def load_parameters(parameters: Named, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Copy saved values into the parameters.

    Raises:
        AuditFailed: the names or shapes are not exactly those of the parameters.
    """
    audit_names(parameters, tensors, source)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def audit_names(parameters: Named, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """
    Raises:
        AuditFailed: a tensor is missing, surplus or of another shape.
    """
    if odd := sorted(set(parameters) ^ set(tensors)):
        raise AuditFailed(
            f"{source} holds {len(tensors)} tensors where the adapter has {len(parameters)}; "
            f"the first that differs is {odd[0]}."
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise AuditFailed(f"{source}: {name} has shape {tuple(tensors[name].shape)}, not {tuple(parameter.shape)}.")


def audit_adapter(parameters: Named, tensors: dict[str, torch.Tensor], num_updates: int, source: Path) -> None:
    """What must be true of every saved adapter: all its tensors, all finite, and some B moved after an update.

    Raises:
        AuditFailed: it is not.
    """
    audit_names(parameters, tensors, source)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise AuditFailed(f"{source}: {name} holds a value that is not finite.")
    outer = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    if num_updates > 0 and outer and not any(bool(tensor.any()) for tensor in outer):
        raise AuditFailed(f"{source}: every LoRA B is zero after {num_updates} updates, so nothing was learned.")
