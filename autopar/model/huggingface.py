"""Hugging Face configs as training jobs: the model is built from ``config.json`` alone, without weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import ModelError
from autopar.model.experts import register_experts
from autopar.model.masks import register_masks, without_packing
from autopar.model.spec import Batch, TrainingJob, default_loss, default_optimizer

DEFAULT_LENGTH = 2048
HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForImageClassification", "CLIPModel")


def load_config(source: str, seq_len: int | None = None) -> TrainingJob:
    """A model from a ``config.json``, with the inputs and labels that its architecture is trained on.

    Args:
        source: the file, or the folder that holds it.
        seq_len: tokens per sample; unset, the model's longest, at most 2048.

    Raises:
        ModelError: transformers is missing, the config is unreadable or its architecture has no known training loss.
    """
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"Hugging Face config {source!r} does not exist", "Give hf:PATH of a folder with config.json")
    try:
        import transformers
    except ImportError:
        raise ModelError("hf: models need the transformers package", "pip install 'autopar[hf]'") from None
    try:
        named = json.loads(path.read_text())
        config = transformers.AutoConfig.for_model(
            named["model_type"], **{k: v for k, v in named.items() if k != "model_type"}
        )
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise ModelError(f"{path} is no config that transformers {transformers.__version__} reads: {error}") from None
    name, build = _builder(transformers, config, path)
    return TrainingJob(
        source=f"hf:{path.resolve()}",
        name=str(config.model_type),
        build_model=build,
        example_batch=_examples(name, config, _length(config, seq_len)),
        compute_loss=default_loss,
        build_optimizer=default_optimizer,
    )


def _length(config: Any, seq_len: int | None) -> int:
    """Tokens per sample."""
    text = getattr(config, "text_config", config)
    names = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len")
    longest = int(next((v for n in names if (v := getattr(text, n, None))), DEFAULT_LENGTH))
    if seq_len is not None and seq_len > longest:
        raise ModelError(f"--seq-len {seq_len} is beyond the model's {longest} positions", "Choose a shorter length")
    return seq_len or min(longest, DEFAULT_LENGTH)


def _examples(name: str, config: Any, length: int) -> Callable[[int], Batch]:
    """A function from batch size to inputs, by what the architecture reads."""

    def tokens(n: int, vocabulary: int) -> torch.Tensor:
        return torch.arange(n * length).reshape(n, length) % vocabulary

    def pixels(n: int, vision: Any) -> torch.Tensor:
        side = int(vision.image_size)
        return torch.linspace(-1, 1, n * 3 * side * side).reshape(n, 3, side, side)

    def example_batch(batch_size: int) -> Batch:
        if name == "CLIPModel":
            ids = tokens(batch_size, int(config.text_config.vocab_size))
            return {"input_ids": ids, "pixel_values": pixels(batch_size, config.vision_config)}
        if name.endswith("ForImageClassification"):
            labels = torch.arange(batch_size) % max(2, int(config.num_labels))
            return {"pixel_values": pixels(batch_size, config), "labels": labels}
        ids = tokens(batch_size, int(config.vocab_size))
        if hasattr(config, "num_mel_bins"):
            shape = (batch_size, int(config.num_mel_bins), 2 * int(config.max_source_positions))
            return {"input_features": torch.zeros(shape), "labels": ids}
        return {"input_ids": ids, "labels": ids.clone()}

    return example_batch


def _builder(transformers: Any, config: Any, path: Path) -> tuple[str, Callable[[], nn.Module]]:
    """Architecture name and a function that builds it, in fp32, without a key-value cache."""
    names = list(getattr(config, "architectures", None) or [])
    name = names[0] if names else ""
    architecture = getattr(transformers, name, None)
    if architecture is None or not name.endswith(HEADS):
        raise ModelError(
            f"{path} names the architecture {name!r}",
            f"Give one whose name ends in {', '.join(HEADS)}, or write a model.py",
        )
    fused = bool(getattr(architecture, "_supports_sdpa", False))

    def build_model() -> nn.Module:
        config.use_cache = False
        if name == "CLIPModel":
            config.return_loss = True
        options: dict[str, Any] = {
            "attn_implementation": register_masks() if fused else "eager",
            "dtype": torch.float32,
        }
        if architecture._can_set_experts_implementation():
            options["experts_implementation"] = register_experts()
        model: nn.Module = architecture._from_config(config, **options)
        model.forward = without_packing(model.forward)
        if name == "CLIPModel":
            model = _WithLoss(model)
        return model.train()

    return name, build_model


class _WithLoss(nn.Module):
    """A model that gives its loss only when asked by a keyword."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.towers = model

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> Any:
        return self.towers(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)
