"""The model in plain torch, its parameters named as transformers names those of
`LlamaForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from demo_model.tokenizer import BOS, CONTEXT_TOKENS, END, PAD, SPECIAL_TOKENS, VOCABULARY_SIZE


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Every size of the model; the defaults give 6.95 million parameters."""

    vocabulary: int = VOCABULARY_SIZE
    hidden: int = 256
    feed_forward: int = 704
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    context_tokens: int = CONTEXT_TOKENS
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def hf_config(self) -> dict[str, object]:
        """The contents of `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context_tokens,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": SPECIAL_TOKENS.index(BOS),
            "eos_token_id": SPECIAL_TOKENS.index(END),
            "pad_token_id": SPECIAL_TOKENS.index(PAD),
            "torch_dtype": "bfloat16",
        }


def rotation(positions: int, shape: ModelShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each [positions, head_dim]."""
    exponents = (
        torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    )
    angles = torch.outer(
        torch.arange(positions, device=device).float(), shape.rope_theta**-exponents
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [batch, heads, positions, head_dim]; the two halves of a head are the two
    coordinates.
    """
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """`x` is [batch, positions, hidden]; `mask` is [batch, 1, positions, positions], true where
        one may look.
        """
        batch, positions, _ = x.shape
        split = (batch, positions, -1, self.shape.head_dim)
        q = _rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin)
        k = _rotate(self.k_proj(x).view(split).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(seen.transpose(1, 2).reshape(batch, positions, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is [batch, positions, hidden]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One block: attention, then the feed-forward part, each on a normalised input."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """`x` is [batch, positions, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Everything under the "model." prefix of the checkpoint."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)


class DemoModel(nn.Module):
    """The language model; the output projection is the embedding itself."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.apply(_initialise)
        # The sum of 2 * layers residual branches should start with the variance of one.
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5)

    def forward(self, ids: Tensor, document: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary]; a token sees only earlier ones of its own
        document.
        """
        positions = ids.shape[1]
        cos, sin = rotation(positions, self.shape, ids.device)
        earlier = torch.ones(positions, positions, dtype=torch.bool, device=ids.device).tril()
        mask = ((document[:, :, None] == document[:, None, :]) & earlier)[:, None]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return nn.functional.linear(self.model.norm(x), self.model.embed_tokens.weight)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
