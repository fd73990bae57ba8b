"""An independent float32 implementation of Llama over the dequantised weights of a GGUF file.

`Llama.hidden` takes tokens and their positions in any arrangement (all tokens
of one prompt, or one token of each of several sequences) and leaves attention,
and so the cache, to the caller's `attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# (layer, q [n, query_heads, head_size], k and v [n, kv_heads, head_size]), q and
# k rotated -> attention output [n, query_heads, head_size].
Attend = Callable[[int, Floats, Floats, Floats], Floats]


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_size: int
    rope_base: float
    rms_epsilon: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, stored [in, out]: y = x @ w."""

    attn_norm: Floats
    qkv: Floats
    attn_output: Floats
    ffn_norm: Floats
    ffn_gate: Floats
    ffn_up: Floats
    ffn_down: Floats


class Llama:
    def __init__(self, gguf_path: Path) -> None:
        reader = GGUFReader(gguf_path)
        self.shape = _read_shape(reader)
        tensors = {tensor.name: tensor for tensor in reader.tensors}

        def weight(name: str) -> Floats:
            tensor = tensors[name + ".weight"]
            plain = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            return np.ascontiguousarray(plain.T)

        def layer(index: int) -> Layer:
            prefix = f"blk.{index}."
            qkv = [weight(f"{prefix}attn_{part}") for part in "qkv"]
            others = {name: weight(prefix + name) for name in Layer.__annotations__ if name != "qkv"}
            return Layer(qkv=np.concatenate(qkv, axis=1), **others)

        self.layers = [layer(index) for index in range(self.shape.layers)]
        self.output_norm = weight("output_norm")
        embedding = weight("token_embd")  # [hidden, vocabulary]
        self.embedding = np.ascontiguousarray(embedding.T)
        self.output = weight("output") if "output.weight" in tensors else embedding

    def hidden(self, tokens: Sequence[int], positions: Sequence[int], attend: Attend) -> Floats:
        """Hidden states [n, hidden] after the last layer and its norm."""
        shape = self.shape
        x = self.embedding[np.asarray(tokens)]
        count = len(x)
        for index, layer in enumerate(self.layers):
            qkv = _rms_norm(x, layer.attn_norm, shape.rms_epsilon) @ layer.qkv
            heads = qkv.reshape(count, shape.query_heads + 2 * shape.kv_heads, shape.head_size)
            q, k, v = np.split(heads, [shape.query_heads, shape.query_heads + shape.kv_heads], axis=1)
            q = rotate(q, positions, shape.rope_base)
            k = rotate(k, positions, shape.rope_base)
            attended = attend(index, q, k, v)
            x = x + attended.reshape(count, -1) @ layer.attn_output
            y = _rms_norm(x, layer.ffn_norm, shape.rms_epsilon)
            x = x + (_silu(y @ layer.ffn_gate) * (y @ layer.ffn_up)) @ layer.ffn_down
        return _rms_norm(x, self.output_norm, shape.rms_epsilon)

    def logits(self, hidden: Floats) -> Floats:
        """Logits [n, vocabulary] of hidden states."""
        return hidden @ self.output


def rotate(x: Floats, positions: Sequence[int], base: float) -> Floats:
    """RoPE on interleaved pairs (2i, 2i+1), the order of GGUF's attn_q and attn_k rows."""
    size = x.shape[-1]
    frequencies = base ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    angles = np.asarray(positions, dtype=np.float64)[:, None, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.empty_like(x)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = even * sin + odd * cos
    return rotated


def causal_probabilities(q: Floats, k: Floats, first: int = 0) -> Floats:
    """Attention probabilities [query_heads, n, t] of n queries at positions first, first + 1, ...

    q [n, query_heads, head_size], k [t, kv_heads, head_size] with t = first + n.
    """
    group = q.shape[1] // k.shape[1]
    scores = q.transpose(1, 0, 2) @ np.repeat(k, group, axis=1).transpose(1, 2, 0)
    scores *= np.float32(1 / np.sqrt(q.shape[-1]))
    future = np.arange(len(k))[None, :] > first + np.arange(len(q))[:, None]
    scores[:, future] = -np.inf
    return softmax(scores)


def softmax(x: Floats) -> Floats:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def weighted_values(probabilities: Floats, v: Floats) -> Floats:
    """Attention output [n, query_heads, head_size] from [query_heads, n, t] and v [t, kv_heads, head_size]."""
    group = probabilities.shape[0] // v.shape[1]
    return (probabilities @ np.repeat(v, group, axis=1).transpose(1, 0, 2)).transpose(1, 0, 2)


class FullCache:
    """The whole K and V of one sequence; `attend` suits prompts in chunks and single tokens."""

    def __init__(self, shape: Shape) -> None:
        empty = np.empty((0, shape.kv_heads, shape.head_size), np.float32)
        self.k = [empty] * shape.layers
        self.v = [empty] * shape.layers

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        first = len(self.k[layer])
        self.k[layer] = np.concatenate([self.k[layer], k])
        self.v[layer] = np.concatenate([self.v[layer], v])
        return weighted_values(causal_probabilities(q, self.k[layer], first), self.v[layer])


def _read_shape(reader: GGUFReader) -> Shape:
    def field(name: str):
        return reader.fields[f"llama.{name}"].contents()

    hidden, query_heads = int(field("embedding_length")), int(field("attention.head_count"))
    return Shape(
        layers=int(field("block_count")),
        hidden=hidden,
        query_heads=query_heads,
        kv_heads=int(field("attention.head_count_kv")),
        head_size=hidden // query_heads,
        rope_base=float(field("rope.freq_base")),
        rms_epsilon=float(field("attention.layer_norm_rms_epsilon")),
    )


def _rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(epsilon)) * weight


def _silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))
