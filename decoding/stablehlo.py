"""A model as StableHLO programs that run without this repository: `jax.export`.

`programs` returns them serialised, for CPU, TPU and CUDA at once, with any batch size
and lengths. They take the parameters by path, as model.safetensors holds them:

    score(params, ...)   log-probabilities of the tokens of given texts
    prefill(params, ...) what decoding needs of prompts
    step(params, ...)    logits of the next token, and the cache with the last one
    classify(params, ...) logits of classes, of an encoder alone

Attention is plain XLA: custom calls, such as our kernels, would need the repository.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export

from headcount.decoding import step as decoding
from headcount.models import folding
from headcount.models.cost import abstract
from headcount.models.huggingface import unnamed
from headcount.models.transformer import Transformer

PLATFORMS = ("cpu", "tpu", "cuda")
POSITION_ROWS = 4096  # of computed positions; later tokens have the last one


def portable(config, params: dict, pooling: str | None):
    """Return the graph of a model that needs nothing but XLA, and its parameters.

    Positions that are added to embeddings are in tables, which can be read at any
    position; computing them needs the length. Attention is the reference's.

    Args:
        config: of the run.
        params: by path.
        pooling: of a classifier; see `models.output_heads.Classifier`.
    """
    settings, params = config.model.to_dict(), dict(params)
    if settings["positions"] in folding.SINUSOIDAL:
        tables = folding.position_tables(config, params, POSITION_ROWS)
        params |= {f"{stack}_positions": table for stack, table in tables.items()}
        settings |= {"positions": "learned", "max_positions": POSITION_ROWS}
    for site in ("attention", *(f"{site}_attention" for site in folding.STACKS)):
        settings[site]["implementation"] = "reference"
    sizes = [len(params["embedding"])]
    if "source_embedding" in params:
        sizes.append(len(params["source_embedding"]))
    kernel = params.get("classifier.linear.kernel")
    classes = {} if kernel is None else {"num_classes": kernel.shape[1]}
    model = abstract(
        partial(Transformer, *sizes, **settings, **classes, pooling=pooling)
    )
    return *nnx.split(model), params


def programs(
    config, params: dict, gates: dict, pooling: str | None = None
) -> tuple[dict[str, bytes], dict]:
    """Return the serialised programs by name, and their parameters by path.

    Args:
        config, params, pooling: see `portable`.
        gates: fixed head gates by site, L N, of the trial.
    """
    graph, state, params = portable(config, params, pooling)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def build(params):
        return nnx.merge(graph, unnamed(params, state))

    B, S, T, L = export.symbolic_shape("B, S, T, L")

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    source, target = [ints(B, S), ints(B)], [ints(B, T), ints(B)]
    if not config.model.num_decoder_layers:
        classify = partial(classify_program, build, gates)
        return serialized({"classify": (classify, shapes, *source)}), params
    has_source = config.model.num_encoder_layers > 0
    prefill = partial(prefill_program, build, gates)
    prompt = jax.eval_shape(prefill, shapes, *source)
    cache = jax.eval_shape(partial(empty_cache, build), shapes, ints(B, L))
    score = partial(score_program, build, gates)
    step = partial(step_program, build, gates)
    arguments = {
        "score": (score, shapes, *(source if has_source else []), *target),
        "prefill": (prefill, shapes, *source),
        "step": (step, shapes, prompt, cache, ints(B), ints()),
    }
    return serialized(arguments), params


def serialized(arguments: dict) -> dict[str, bytes]:
    """Return exported functions by name, from (function, *abstract arguments)."""
    return {
        name: export.export(jax.jit(function), platforms=PLATFORMS)(*given).serialize()
        for name, (function, *given) in arguments.items()
    }


def as_batch(side: str, tokens, lengths) -> dict:
    """Return a side of a batch with a text per row."""
    place = jnp.arange(tokens.shape[1])
    return {
        side: tokens,
        f"{side}_segments": (place < lengths[:, None]).astype(jnp.int32),
        f"{side}_positions": jnp.broadcast_to(place, tokens.shape),
    }


def classify_program(build, gates, params, tokens, lengths):
    """Return the logits of the classes, B S C; a text's are at its first token."""
    batch = as_batch("source", tokens, lengths)
    return build(params).class_logits(batch, head_gates=gates)


def score_program(build, gates, params, *texts):
    """Return the log-probability of every token, B T; 0 after a text's end.

    Args:
        texts: tokens B S, lengths B of the source if there is one, and the same of the
            target.
    """
    model, batch = build(params), {}
    sides = ("source", "target") if model.encoder else ("target",)
    for side, tokens, lengths in zip(sides, texts[::2], texts[1::2], strict=True):
        batch |= as_batch(side, tokens, lengths)
    logits = model(batch, head_gates=gates)
    found = jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["target"][..., None], axis=-1
    )
    return jnp.where(batch["target_segments"] > 0, found[..., 0], 0.0)


def prefill_program(build, gates, params, prompts, lengths) -> dict:
    """Return a prompt as a dict; see `decoding.step.Prompt`."""
    return decoding.prefill(build(params), prompts, lengths, gates)._asdict()


def empty_cache(build, params, slots) -> list:
    """Return a cache of zeros, for as many tokens as `slots`, B L, has columns."""
    model = build(params)
    B, L = slots.shape
    x = jnp.zeros((B, L, model.width))
    return [
        [jnp.zeros_like(each) for each in decoding.entries(layer.self_attention, x)[0]]
        for layer in model.decoder
    ]


def step_program(build, gates, params, prompt, cache, token, number):
    """Return the logits of the next token, B vocab, and the cache.

    Args:
        prompt: of `prefill`.
        cache: of the step before; zeros at first.
        token: B, the last one; at first `prompt["first"]`.
        number: how many steps were done before.
    """
    model = build(params)
    B, L = token.shape[0], cache[0][0].shape[3]
    prompt = decoding.Prompt(**prompt)._replace(first=token)
    slots = jnp.broadcast_to(jnp.arange(L) <= number, (B, L))
    rows = decoding.Rows(
        begin=jnp.zeros(B, jnp.int32),
        limit=None,
        key=None,
        done=None,
        tokens=jnp.broadcast_to(token[:, None, None], (B, 1, L)),
        visible=slots[:, None, :, None],
        log_probs=None,
        num_finished=None,
        best=None,
        prompt=prompt,
    )
    state = decoding.State(number, rows, [tuple(each) for each in cache])
    hidden, cache = decoding.next_hidden(model, state, gates)
    return model.logits(hidden)[:, 0], [list(each) for each in cache]
