"""Convert our tokenizers to Hugging Face's tokenizer.json with the same ids."""

import json

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from headcount.data import tokenizers as ours
from headcount.data.tokenizers import SPECIAL


def tokenizer_json(tokenizer) -> str:
    """Return the JSON of a tokenizer that encodes and decodes like ours.

    It adds neither BOS nor EOS, because language models are trained without EOS.

    Raises:
        NotImplementedError: the tokenizer can't be converted.
    """
    if isinstance(tokenizer, ours.JsonTokenizer):  # imported as a tokenizer.json
        return tokenizer.vocabulary
    make = MAKERS.get(type(tokenizer))  # exact type: a subclass also has other ids
    if make is None:
        raise NotImplementedError(
            f"{type(tokenizer).__name__} has no form in a tokenizer.json."
        )
    converted = make(tokenizer)
    converted.add_special_tokens(SPECIAL)
    return converted.to_str()


def _table(tokenizer: ours.TableTokenizer):
    doubled = set(SPECIAL) & set(tokenizer.units)
    if doubled:
        raise NotImplementedError(
            f"A tokenizer.json can't tell the word {min(doubled)} of this vocabulary "
            f"from the special token of this name."
        )
    names = [*SPECIAL, *tokenizer.units]
    vocabulary = {name: i for i, name in enumerate(names)}
    converted = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    if tokenizer.separator:
        converted.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        converted.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)|\n"), "isolated")
        converted.decoder = decoders.Fuse()
    return converted


def _bytes(tokenizer: ours.ByteTokenizer):
    vocabulary = {name: i for i, name in enumerate(SPECIAL)}
    for value, letter in enumerate(_letters()):
        vocabulary[letter] = ours.NUM_SPECIAL + value
    converted = Tokenizer(models.BPE(vocabulary, []))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    converted.pre_tokenizer = byte_level
    converted.decoder = decoders.ByteLevel()
    return converted


def _letters() -> list[str]:
    """Return the letter that represents each byte in byte-level BPE, as in GPT-2.

    Bytes that are printable in Latin-1 represent themselves. The others are mapped to
    code points from 256.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def _sentencepiece(tokenizer: ours.SentencePieceTokenizer):
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.vocabulary)
    names = [piece.piece for piece in proto.pieces]
    scores = {piece.piece: piece.score for piece in proto.pieces}
    vocabulary = {name: i for i, name in enumerate(names)}
    merges = []
    for name in names[ours.NUM_SPECIAL :]:
        for cut in range(1, len(name)):
            left, right = name[:cut], name[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[name], vocabulary[left], vocabulary[right]))
    merges = [(names[left], names[right]) for _, left, right in sorted(merges)]
    converted = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True)
    )
    converted.add_tokens([p.piece for p in proto.pieces if p.type == p.USER_DEFINED])
    spec = proto.normalizer_spec
    charsmap = spec.precompiled_charsmap
    steps = [normalizers.Precompiled(charsmap)] if charsmap else []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    converted.normalizer = normalizers.Sequence(steps)
    scheme = "always" if spec.add_dummy_prefix else "never"
    converted.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme=scheme, split=False
    )
    converted.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return converted


MAKERS = {
    ours.TableTokenizer: _table,
    ours.ByteTokenizer: _bytes,
    ours.SentencePieceTokenizer: _sentencepiece,
}


def configuration(separator: str, is_causal: bool) -> str:
    """Return tokenizer_config.json.

    Args:
        separator: token between documents, which is BOS and EOS.
        is_causal: whether the model is decoder-only, without token types.
    """
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": separator,
        "eos_token": separator,
        "clean_up_tokenization_spaces": False,
    }
    if is_causal:
        settings["model_input_names"] = ["input_ids", "attention_mask"]
    if separator in SPECIAL:
        settings |= {"pad_token": "<pad>", "unk_token": "<unk>"}
    return json.dumps(settings, indent=1) + "\n"
