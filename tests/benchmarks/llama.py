"""Llama 3 as a Hugging Face ``config.json``."""

from __future__ import annotations

from typing import Any


def llama(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int = 8, **more: Any) -> dict[str, Any]:
    """Llama 3's shapes (Grattafiori et al. 2024, arXiv 2407.21783, table 3)."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        **more,
    }


LLAMA_8B, LLAMA_70B = llama(32, 4096, 14336, 32), llama(80, 8192, 28672, 64)
LLAMA_405B = llama(126, 16384, 53248, 128)
