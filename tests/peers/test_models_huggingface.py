"""Whole models of transformers, with random weights, brought in as a user would.

transformers saves them into a folder, `import_checkpoint` makes a run of it,
and both models get the same tokens. Everything is made here: no network.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from headcount.configs.presets import get_config as preset
from headcount.data import tokenizers
from headcount.exchange.exporting import export
from headcount.exchange.importing import import_checkpoint, load_model, split
from headcount.models.cost import parameters
from tests.decoding_cases import decode

TOLERANCE = 1e-4
VOCAB = 50
TEXT = ["the dog sees a cat", "a cat sees the dog", "dogs and cats", "a dog, a cat!"]


@pytest.fixture(autouse=True)
def seeded():
    """Let models start alike in every run, for a failure to be repeatable."""
    torch.manual_seed(0)


def randomised(model, scale=0.15):
    """Random weights that are large enough for logits to differ."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape)
    return model.eval()


def brought_in(model, folder):
    """Ours, of theirs."""
    model.save_pretrained(folder / "theirs")
    import_checkpoint(folder / "theirs", folder / "run")
    return load_model(folder / "run")


def rows(rng, lengths, low, high):
    """Tokens and a mask, one sentence a row, padded with 0 behind."""
    tokens = np.zeros((len(lengths), max(lengths)), np.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = rng.integers(low, high, length)
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    return tokens, mask


def side(name, tokens, mask):
    """A side of our batch."""
    return {
        name: jnp.asarray(tokens, jnp.int32),
        f"{name}_segments": jnp.asarray(mask, jnp.int32),
        f"{name}_positions": jnp.broadcast_to(jnp.arange(mask.shape[1]), mask.shape),
    }


def close(ours, theirs, mask):
    difference = np.abs(np.asarray(ours) - theirs.detach().numpy())[mask]
    assert difference.max() < TOLERANCE
    assert np.abs(theirs.detach().numpy()).max() > 1  # else the bound says little


def test_bert(tmp_path):
    theirs = randomised(
        transformers.BertForPreTraining(
            transformers.BertConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                max_position_embeddings=24,
            )
        )
    )
    ours = brought_in(theirs, tmp_path)
    rng = np.random.default_rng(0)
    tokens, mask = rows(rng, (9, 4, 1), 0, VOCAB)
    types = rng.integers(0, 2, tokens.shape)
    with torch.no_grad():
        out = theirs(
            torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            token_type_ids=torch.tensor(types),
            output_hidden_states=True,
            return_dict=True,
        )
        pooled = theirs.bert.pooler(out.hidden_states[-1])
    batch = side("source", tokens, mask) | {"source_types": jnp.asarray(types)}
    hidden = ours.hidden(batch)
    close(ours.logits(hidden), out.prediction_logits, mask)
    close(hidden, out.hidden_states[-1], mask)
    assert (
        np.abs(np.asarray(ours.pooler(hidden[:, 0])) - pooled.numpy()).max() < TOLERANCE
    )


def test_gpt2(tmp_path):
    theirs = randomised(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=24,
                bos_token_id=VOCAB - 1,
                eos_token_id=VOCAB - 1,
            )
        )
    )
    ours = brought_in(theirs, tmp_path)
    targets, mask = rows(np.random.default_rng(0), (9, 4, 1), 0, VOCAB)
    inputs = np.concatenate([np.full((3, 1), VOCAB - 1), targets[:, :-1]], axis=1)
    with torch.no_grad():
        wanted = theirs(torch.tensor(inputs), attention_mask=torch.tensor(mask)).logits
    close(ours(side("target", targets, mask)), wanted, mask)


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    """Theirs, ours, and what our ids are in theirs."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("marian")
    theirs = randomised(
        transformers.MarianMTModel(
            transformers.MarianConfig(
                vocab_size=VOCAB,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=48,
                decoder_ffn_dim=48,
                activation_function="swish",
                max_position_embeddings=64,
                scale_embedding=True,
                pad_token_id=VOCAB - 1,
                decoder_start_token_id=VOCAB - 1,
                eos_token_id=0,
                forced_eos_token_id=None,
            )
        )
    )
    theirs.final_logits_bias += torch.randn(theirs.final_logits_bias.shape)
    theirs.final_logits_bias[0, 0] += 3.0  # or sentences have no end
    (folder / "theirs").mkdir()
    model = tokenizers.train_sentencepiece(TEXT, 30)
    spm = sentencepiece.SentencePieceProcessor(model_proto=model)
    names = ["</s>", "<unk>"]
    names += [spm.id_to_piece(i) for i in range(4, spm.vocab_size())][::-1]
    names += [f"unused{i}" for i in range(VOCAB - 1 - len(names))] + ["<pad>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    (folder / "theirs" / "vocab.json").write_text(json.dumps(vocabulary))
    for name in ("source", "target"):
        (folder / "theirs" / f"{name}.spm").write_bytes(model)
    ours = brought_in(theirs, folder)
    number = np.array([VOCAB - 1, *tokenizers.marian_order(vocabulary)])
    return theirs, ours, number, folder


def test_marian_logits(marian):
    theirs, ours, number, _ = marian
    rng = np.random.default_rng(0)
    source, source_mask = rows(rng, (9, 4, 1), 2, VOCAB)
    target, target_mask = rows(rng, (5, 7, 3), 2, VOCAB)
    inputs = np.concatenate([np.ones((3, 1), int), target[:, :-1]], axis=1)
    with torch.no_grad():
        wanted = theirs(
            torch.tensor(number[source]),
            attention_mask=torch.tensor(source_mask),
            decoder_input_ids=torch.tensor(number[inputs]),
        ).logits
    batch = side("source", source, source_mask) | side("target", target, target_mask)
    got = ours(batch)
    close(got[..., 1:], wanted[..., number[1:]], target_mask)
    assert (np.asarray(got[..., 0])[target_mask] < -90).all()  # padding, ours alone


@pytest.mark.parametrize("beam_size", [1, 4])
def test_marian_translates_token_for_token(marian, beam_size):
    """Length penalties differ in form (Wu et al.'s here), so both are 0: none."""
    theirs, ours, number, _ = marian
    lengths = (9, 4, 1, 12, 7, 3, 6, 2)
    source, mask = rows(np.random.default_rng(1), lengths, 3, VOCAB)
    longest = 40
    with torch.no_grad():
        wanted = theirs.generate(
            torch.tensor(number[source]),
            attention_mask=torch.tensor(mask),
            num_beams=beam_size,
            do_sample=False,
            length_penalty=0.0,
            early_stopping=False,
            bad_words_ids=[[VOCAB - 1]],
            max_length=longest + 1,  # with the token that decoding starts from
        ).numpy()
    prompts = jnp.asarray(source, jnp.int32), jnp.asarray(mask.sum(1), jnp.int32)
    found = decode(ours, *prompts, max_length=longest, beam_size=beam_size).tokens
    ended = 0
    for row, other in zip(np.asarray(found), wanted, strict=True):
        row = number[row[row > 0]].tolist()
        other = other[1:].tolist()
        if 0 not in other:  # cut off there, ended by force here
            assert row[:-1] == other[: longest - 1]
            continue
        assert row == other[: other.index(0) + 1]
        ended += 1
    assert ended >= 5


def test_marian_tokenizer(marian):
    *_, folder = marian
    theirs = transformers.MarianTokenizer.from_pretrained(folder / "theirs")
    source, target = tokenizers.load_pair(folder / "run" / "tokenizer")
    _, _, number, _ = marian
    for line in [*TEXT, "", "a zebra"]:
        ids = source.encode([line])[0]
        assert number[ids].tolist() == theirs(line).input_ids
        if line in TEXT:
            wanted = theirs.decode(theirs(line).input_ids, skip_special_tokens=True)
            assert target.decode(ids) == wanted == line


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("GPT2LMHeadModel", {"model_type": "gpt2", "n_layer": 1, "n_embd": 8}),
        ("BertForMaskedLM", {"model_type": "bert", "num_hidden_layers": 1}),
        ("BertModel", {"model_type": "bert", "num_hidden_layers": 1}),
    ],
)
def test_transformers_reads_what_goes_out(kind, settings, tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 16} if "Bert" in kind else {}
    heads = {"n_head": 2} if "GPT" in kind else {"num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(
        **settings, **sizes, **heads, vocab_size=VOCAB, bos_token_id=1, eos_token_id=1
    )
    make = getattr(transformers, kind)
    theirs = randomised(make(config))
    brought_in(theirs, tmp_path)
    export(tmp_path / "run", "huggingface", tmp_path / "out")
    back = make.from_pretrained(tmp_path / "out")
    there = theirs.state_dict()
    assert there.keys() == back.state_dict().keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, there[name]), name


@pytest.mark.parametrize(
    "name, kind, config",
    [
        ("bert_base", "BertModel", {}),
        (
            "bert_large",
            "BertModel",
            {
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "intermediate_size": 4096,
            },
        ),
        ("gpt2_small", "GPT2LMHeadModel", {}),
        (
            "gpt2_medium",
            "GPT2LMHeadModel",
            {"n_embd": 1024, "n_layer": 24, "n_head": 16},
        ),
    ],
)
def test_presets_count_what_transformers_count(name, kind, config):
    make = getattr(transformers, kind)
    with torch.device("meta"):
        theirs = make(make.config_class(**config))
    assert parameters(split(preset(name))[1]) == theirs.num_parameters()
