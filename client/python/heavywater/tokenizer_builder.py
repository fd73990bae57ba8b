"""Builds a served model's tokenizer from what the server sends of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from heavywater.v1 import generation_pb2

# Piece.type, as in GGUF.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_SPACE = "\u2581"  # SentencePiece's
# Llama 3's and Qwen 2's, which differ in how many digits are a word.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"llama-bpe": "{1,3}", "qwen2": ""}


def build_tokenizer(
    info: generation_pb2.ModelInfo,
    pieces: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    merges: Sequence[tuple[str, str]],
) -> Tokenizer:
    """The tokenizer of `pieces` by id; it adds no token of its own.

    Raises ValueError for one that this client cannot build.
    """
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    if info.tokenizer_model == "llama":
        tokenizer = _character_level(info, pieces, types, scores, merges, vocabulary)
    else:
        tokenizer = _byte_level(info, merges, vocabulary)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [piece for piece, other in zip(pieces, types, strict=True) if other == kind]
        added = [AddedToken(piece, special=special, normalized=False) for piece in found]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer


def _byte_level(
    info: generation_pb2.ModelInfo, merges: Sequence[tuple[str, str]], vocabulary: dict[str, int]
) -> Tokenizer:
    kind = (info.tokenizer_model, info.pre_tokenizer)
    known = [("gpt2", name) for name in ("smollm", *_DIGITS)]
    if kind not in known:
        raise ValueError(f"tokenizer {kind} is not supported, this client builds {known} and 'llama'")
    whole_words_first = info.pre_tokenizer == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges), ignore_merges=whole_words_first))
    if info.pre_tokenizer == "smollm":  # every digit alone, then GPT-2's pattern
        words = pre_tokenizers.Digits(individual_digits=True)
    else:
        pattern = Regex(_PATTERN.replace("DIGITS", _DIGITS[info.pre_tokenizer]))
        words = pre_tokenizers.Split(pattern, behavior="isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=info.pre_tokenizer == "smollm")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])
    if info.pre_tokenizer == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _character_level(
    info: generation_pb2.ModelInfo,
    pieces: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    merges: Sequence[tuple[str, str]],
    vocabulary: dict[str, int],
) -> Tokenizer:
    unknown = pieces[info.unknown_token] if info.unknown_token >= 0 else None
    pairs = list(merges) or list(_merges_of(pieces, types, scores))
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    if info.space_prefix in ("every_segment_but_spaces", "start_but_spaces"):
        scheme = "first" if info.space_prefix == "start_but_spaces" else "always"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    else:
        prefix = [normalizers.Prepend(_SPACE)] if info.space_prefix == "every_segment" else []
        tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges_of(pieces: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """SentencePiece merges what makes the highest score: every way to make a piece, by its score."""
    normal = {piece: index for index, piece in enumerate(pieces) if types[index] in (_NORMAL, _USER_DEFINED)}
    for piece in sorted(normal, key=lambda piece: (-scores[normal[piece]], normal[piece])):
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        made = [(left, right) for left, right in cuts if left in normal and right in normal]
        yield from sorted(made, key=lambda pair: (normal[pair[0]], normal[pair[1]]))
