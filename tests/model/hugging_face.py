"""Small Hugging Face configs, one for each architecture that capture is tested on; two or more layers, odd sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 3,
        "vocab_size": 64,
        "n_positions": 16,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], **LLAMA},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8, **LLAMA},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 8, **LLAMA},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 8,
        **LLAMA,
        "num_hidden_layers": 4,
        "sliding_window": 8,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 8,
        **LLAMA,
        "num_hidden_layers": 8,
        "sliding_window": 8,
    },
    "mpt": {
        "architectures": ["MptForCausalLM"],
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 16,
        "vocab_size": 64,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        **LLAMA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 8, "num_experts": 6, **EXPERTS, **LLAMA},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **LLAMA,
        **EXPERTS,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 8,
        **LLAMA,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "vocab_size": 64,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_heads": 4,
        "num_layers": 3,
        "vocab_size": 64,
        "n_positions": 16,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "image_size": 16,
        "patch_size": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "clip": {
        "architectures": ["CLIPModel"],
        "projection_dim": 24,
        "text_config": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "intermediate_size": 48,
            "vocab_size": 64,
            "max_position_embeddings": 16,
            "eos_token_id": 63,
        },
        "vision_config": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "intermediate_size": 48,
            "image_size": 16,
            "patch_size": 4,
        },
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 32,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "vocab_size": 64,
        "num_mel_bins": 8,
        "max_source_positions": 12,
        "max_target_positions": 16,
        "dropout": 0.0,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
    "mamba": {
        "architectures": ["MambaForCausalLM"],
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "state_size": 4,
        "vocab_size": 64,
        "max_position_embeddings": 8,
    },
}


def write_config(folder: Path, model_type: str, config: dict[str, Any]) -> str:
    """Writes a ``config.json``; returns what ``load`` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    return f"hf:{folder}"
