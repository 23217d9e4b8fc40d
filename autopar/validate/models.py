"""The model of a measured run as an nn.Module: a decoder with the options that the families differ by.

GPT-2 and MPT: learned positions, LayerNorm, GELU. Llama: rotary positions, RMSNorm, SwiGLU, grouped queries. DeepSeek:
multi-head latent attention and experts beside shared ones (DeepSeek-AI 2024, arXiv 2405.04434, sections 2.1 and 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.model.spec import TrainingJob, default_optimizer
from autopar.validate.rows import Row

GATED = ("llama", "deepseek", "mixtral", "qwen", "qwen2", "qwen3", "mistral", "gemma", "nemotron")


@dataclass(frozen=True)
class Shape:
    """What one device's share of data and experts sees of a model.

    Attributes:
        length: tokens of a sequence on one context-parallel shard.
        experts: whole experts on one expert-parallel shard.
    """

    row: Row
    layers: int
    length: int
    experts: int
    dtype: torch.dtype

    @property
    def merged(self) -> bool:
        """Whether query, key and value (and gate and up) are one product each, as in Megatron-LM and llm-foundry."""
        return self.row.zero_stage != 3 or self.row.family == "mpt" or "dp" in (self.row.overlap or "")

    @property
    def gated(self) -> bool:
        return self.row.family not in ("gpt2", "gpt", "gpt3", "mpt", "opt", "bert")

    @property
    def head_dim(self) -> int:
        return self.row.head_dim or self.row.hidden // self.row.heads

    @property
    def kv_heads(self) -> int:
        return self.row.kv_heads or self.row.heads


def norm(shape: Shape, width: int) -> nn.Module:
    return nn.RMSNorm(width) if shape.gated else nn.LayerNorm(width)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864); x is [batch, heads, length, width]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    """Multi-head or grouped-query attention, fused or with its softmax materialised."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        row, self.shape = shape.row, shape
        bias = not shape.gated
        queries, others = row.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
        self.q = None if shape.merged else nn.Linear(row.hidden, queries, bias)
        self.kv = nn.Linear(row.hidden, others + (queries if shape.merged else 0), bias)
        self.out = nn.Linear(row.heads * shape.head_dim, row.hidden, bias)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        width, groups = self.shape.head_dim, self.shape.kv_heads
        if self.q is None:
            per = self.shape.row.heads // groups
            qkv = self.kv(x).view(batch, length, groups, (per + 2) * width)
            q, k, v = qkv.split((per * width, width, width), dim=-1)
            q, k, v = q.reshape(batch, length, -1, width).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        else:
            q = self.q(x).view(batch, length, -1, width).transpose(1, 2)
            k, v = self.kv(x).view(batch, length, groups, 2 * width).transpose(1, 2).split(width, dim=-1)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = attend(q, k, v, fused=self.shape.row.flash_attention != 0)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def attend(q: Tensor, k: Tensor, v: Tensor, fused: bool) -> Tensor:
    """Causal attention; unfused: scores, one scaled masked softmax, dropout, as Megatron-LM's fused-softmax kernel."""
    if fused:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    weights = F.softmax(q @ k.transpose(-1, -2), dim=-1)
    return F.dropout(weights, 0.1, training=True) @ v


class LatentAttention(nn.Module):
    """Multi-head latent attention: low-rank queries, keys and values; the rotary part is shared by heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        row, self.row = shape.row, shape.row
        self.nope, self.rope = row.qk_nope_head_dim or 128, row.qk_rope_head_dim or 64
        self.value, rank = row.v_head_dim or 128, row.kv_lora_rank or 512
        wide = row.heads * (self.nope + self.rope)
        if row.q_lora_rank:
            self.q_down: nn.Module = nn.Sequential(
                nn.Linear(row.hidden, row.q_lora_rank, False), norm(shape, row.q_lora_rank)
            )
            self.q_up = nn.Linear(row.q_lora_rank, wide, False)
        else:
            self.q_down, self.q_up = nn.Identity(), nn.Linear(row.hidden, wide, False)
        self.kv_down = nn.Linear(row.hidden, rank + self.rope, False)
        self.kv_norm, self.rank = norm(shape, rank), rank
        self.kv_up = nn.Linear(rank, row.heads * (self.nope + self.value), False)
        self.out = nn.Linear(row.heads * self.value, row.hidden, False)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        heads = self.row.heads
        q = self.q_up(self.q_down(x)).view(batch, length, heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        latent, k_rope = self.kv_down(x).split((self.rank, self.rope), dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(batch, length, heads, -1).transpose(1, 2)
        k_nope, v = kv.split((self.nope, self.value), dim=-1)
        k_rope = k_rope.unsqueeze(1)
        assert cos is not None
        assert sin is not None
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_nope, rotate(k_rope, cos, sin).expand(-1, heads, -1, -1)), dim=-1)
        mixed = attend(q, k, v, fused=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """GELU or SwiGLU."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        hidden, bias = shape.row.hidden, not shape.gated
        self.gated, self.width, merged = shape.gated, width, shape.gated and shape.merged
        self.gate = nn.Linear(hidden, width, False) if shape.gated and not merged else None
        self.up = nn.Linear(hidden, 2 * width if merged else width, bias)
        self.down = nn.Linear(width, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if not self.gated:
            return self.down(F.gelu(up))
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * up)
        gate, up = up.unflatten(-1, (self.width, 2)).unbind(-1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Routed experts on one shard, every one with an equal part of the tokens, beside shared experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        row, width = shape.row, shape.row.moe_ffn or shape.row.ffn
        self.top_k, self.count = row.top_k or 1, shape.experts
        self.router = nn.Linear(row.hidden, row.experts or 1, False)
        self.up = nn.Parameter(torch.empty(self.count, row.hidden, 2 * width))
        self.down = nn.Parameter(torch.empty(self.count, width, row.hidden))
        self.shared = FeedForward(shape, row.shared_expert_ffn) if row.shared_expert_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        tokens = x.reshape(batch * length, hidden)
        scores = F.softmax(self.router(tokens).float(), dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        order = chosen.reshape(-1).argsort()
        routed = tokens.index_select(0, order // self.top_k)
        per_expert = routed.shape[0] // self.count
        ends = torch.arange(1, self.count + 1, device=x.device, dtype=torch.int32) * per_expert
        a, b = torch._grouped_mm(routed, self.up, offs=ends).chunk(2, dim=-1)
        kept = F.silu(a) * b * weights.reshape(-1, 1).to(x.dtype)
        made = torch._grouped_mm(kept, self.down, offs=ends)
        back = made.index_select(0, order.argsort()).view(batch * length, self.top_k, hidden).sum(1)
        back = back.view(batch, length, hidden)
        return back + self.shared(x) if self.shared is not None else back


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        row = shape.row
        self.attention_norm, self.ffn_norm = norm(shape, row.hidden), norm(shape, row.hidden)
        self.attention: nn.Module = LatentAttention(shape) if row.kv_lora_rank else Attention(shape)
        sparse = bool(row.experts) and index >= min(row.dense_layers or 0, shape.layers - 1)
        self.ffn: nn.Module = Experts(shape) if sparse else FeedForward(shape, row.ffn)
        self.dropout = 0.1 if not shape.gated and row.flash_attention == 0 else 0.0

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x), cos, sin))
        return x + self._drop(self.ffn(self.ffn_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, training=True) if self.dropout else x


class Embedding(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        row = shape.row
        self.tokens = nn.Embedding(row.vocab, row.hidden)
        self.positions = None if shape.gated else nn.Embedding(row.seq_len, row.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is None:
            return x
        return x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Decoder(nn.Module):
    """Embedding, blocks, norm and head; returns logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        row, self.shape = shape.row, shape
        self.embedding = Embedding(shape)
        self.blocks = nn.ModuleList(DecoderBlock(shape, i) for i in range(shape.layers))
        self.norm = norm(shape, row.hidden)
        self.head = nn.Linear(row.hidden, row.vocab, bias=False)
        if row.tied_embeddings:
            self.head.weight = self.embedding.tokens.weight
        self.to(shape.dtype)
        width = (row.qk_rope_head_dim or shape.head_dim) if shape.gated else 0
        if width:
            self.register_buffer("cos", torch.empty(shape.length, width, dtype=shape.dtype), persistent=False)
            self.register_buffer("sin", torch.empty(shape.length, width, dtype=shape.dtype), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = getattr(self, "cos", None), getattr(self, "sin", None)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def job_of(shape: Shape) -> TrainingJob:
    """The training job of a run's model; build it under ``torch.device("meta")``."""

    def batch(size: int) -> dict[str, Tensor]:
        tokens = torch.zeros((size, shape.length), dtype=torch.long)
        return {"tokens": tokens, "labels": tokens.clone()}

    def loss(output: Tensor, batch: object) -> Tensor:
        assert isinstance(batch, dict)
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())

    row = shape.row
    name = f"{row.family}-{row.layers}x{row.hidden}"
    return TrainingJob(name, name, lambda: Decoder(shape), batch, loss, default_optimizer)
