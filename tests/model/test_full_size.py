"""Full-size configurations: captured without allocation, with the published number of parameters and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.model.capture import capture
from autopar.model.spec import load
from tests.benchmarks.llama import LLAMA_8B, LLAMA_70B, LLAMA_405B, llama
from tests.model.hugging_face import write_config

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

MISTRAL = {"architectures": ["MistralForCausalLM"], "vocab_size": 32000, "sliding_window": 4096}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "num_local_experts": 8}
# model type, config where it differs from the type's defaults, parameters of the published checkpoint, layers of a kind
FULL: dict[str, tuple[str, dict[str, Any], int, dict[str, int]]] = {
    "gpt2": ("gpt2", {"architectures": ["GPT2LMHeadModel"]}, 124_439_808, {"transformer.h": 12}),
    "llama-3-8b": ("llama", LLAMA_8B, 8_030_261_248, {"model.layers": 32}),
    "llama-3-70b": ("llama", LLAMA_70B, 70_553_706_496, {"model.layers": 80}),
    "llama-3-405b": ("llama", LLAMA_405B, 405_853_388_800, {"model.layers": 126}),
    "mistral-7b": ("mistral", {**llama(32, 4096, 14336, 32), **MISTRAL}, 7_241_732_096, {"model.layers": 32}),
    "mixtral-8x7b": ("mixtral", {**llama(32, 4096, 14336, 32), **MIXTRAL}, 46_702_792_704, {"model.layers": 32}),
    "mixtral-8x22b": ("mixtral", {**llama(56, 6144, 16384, 48), **MIXTRAL}, 140_620_634_112, {"model.layers": 56}),
    "qwen3-8b": (
        "qwen3",
        {**llama(36, 4096, 12288, 32), "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128},
        8_190_735_360,
        {"model.layers": 36},
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            **llama(48, 2048, 6144, 32, 4),
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 151936,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        30_532_122_624,
        {"model.layers": 48},
    ),
    "gemma-2-9b": (
        "gemma2",
        {
            "architectures": ["Gemma2ForCausalLM"],
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "vocab_size": 256000,
        },
        9_241_705_984,
        {"model.layers": 21, "model.layers_2": 21},
    ),
    "mpt-7b": (
        "mpt",
        {
            "architectures": ["MptForCausalLM"],
            "d_model": 4096,
            "n_heads": 32,
            "n_layers": 32,
            "vocab_size": 50432,
            "max_seq_len": 2048,
        },
        6_649_286_656,
        {"transformer.blocks": 32},
    ),
    "deepseek-v3": ("deepseek_v3", {"architectures": ["DeepseekV3ForCausalLM"]}, 671_026_404_352, {}),
    "gpt-oss-20b": (
        "gpt_oss",
        {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 24, "num_local_experts": 32},
        20_914_757_184,
        {"model.layers": 12, "model.layers_2": 12},
    ),
    "bert-base": ("bert", {"architectures": ["BertForMaskedLM"]}, 109_514_298, {"bert.encoder.layer": 12}),
    "t5-11b": (
        "t5",
        {
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": 1024,
            "d_kv": 128,
            "d_ff": 65536,
            "num_heads": 128,
            "num_layers": 24,
            "decoder_start_token_id": 0,
        },
        11_307_321_344,
        {},
    ),
    "vit-base": (
        "vit",
        {"architectures": ["ViTForImageClassification"], "num_labels": 1000},
        86_567_656,
        {"vit.layers": 12},
    ),
    "clip-vit-b-32": ("clip", {"architectures": ["CLIPModel"]}, 151_277_313, {}),
    "whisper-large-v3": (
        "whisper",
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "vocab_size": 51866,
            "num_mel_bins": 128,
        },
        1_543_490_560,
        {},
    ),
}


@pytest.mark.parametrize("name", list(FULL))
def test_a_full_size_model_has_the_published_parameters(name: str, tmp_path: Path) -> None:
    model_type, config, parameters, layers = FULL[name]
    graph = capture(load(write_config(tmp_path, model_type, {**config, "model_type": model_type})), 1, "cuda")
    kinds = {kind: len(blocks) for kind, blocks in graph.block_kinds().items()}
    assert graph.parameter_count == parameters, (graph.parameter_count, kinds)
    assert not [kind for kind, count in layers.items() if kinds.get(kind) != count], kinds
