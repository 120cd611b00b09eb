"""Export a model with `jax.export` to StableHLO programs that run standalone.

`programs` returns serialised programs for CPU, TPU and CUDA, for any batch size and
lengths. They take parameters by path, as in model.safetensors:

    score(params, ...)    log-probabilities of the tokens of given texts
    prefill(params, ...)  prompts as decoding needs them
    step(params, ...)     logits of the next token, and the extended cache
    classify(params, ...) logits of classes, for encoder-only models

Attention is plain XLA, because custom calls such as our kernels need this repository.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export

from headcount.decoding import step as decoding
from headcount.exchange import folding
from headcount.exchange.huggingface import unnamed
from headcount.models.cost import abstract
from headcount.models.transformer import Transformer

PLATFORMS = ("cpu", "tpu", "cuda")
POSITION_ROWS = 4096  # computed positions; later tokens use the last one


def portable(config, params: dict, pooling: str | None):
    """Return a model's graph, abstract state and parameters that only need XLA.

    Sinusoidal positions become tables, because computing them needs a static length.
    Attention uses the reference implementation.

    Args:
        config: the run's config.
        params: parameters by path.
        pooling: pooling of the classifier; see `models.output_heads.Classifier`.
    """
    settings, params = config.model.to_dict(), dict(params)
    if settings["positions"] in folding.SINUSOIDAL:
        tables = folding.position_tables(config, params, POSITION_ROWS)
        params |= {f"{stack}_positions": table for stack, table in tables.items()}
        settings |= {"positions": "learned", "max_positions": POSITION_ROWS}
    settings["attention"]["implementation"] = "reference"
    for site in folding.STACKS:
        settings[f"{site}_attention"]["implementation"] = None  # the general one
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
        gates: the trial's fixed head gates by site, L N.
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
        types = [ints(B, S)] if config.model.token_types else []
        return serialized({"classify": (classify, shapes, *source, *types)}), params
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
    """Export and serialise functions, given as (function, *abstract arguments)."""
    return {
        name: export.export(jax.jit(function), platforms=PLATFORMS)(*inputs).serialize()
        for name, (function, *inputs) in arguments.items()
    }


def as_batch(side: str, tokens, lengths) -> dict:
    """Build one side of a batch with a text per row."""
    place = jnp.arange(tokens.shape[1])
    return {
        side: tokens,
        f"{side}_segments": (place < lengths[:, None]).astype(jnp.int32),
        f"{side}_positions": jnp.broadcast_to(place, tokens.shape),
    }


def classify_program(build, gates, params, tokens, lengths, types=None):
    """Compute logits of classes, B S C; those of a text are at its first token.

    Args:
        types: token types, B S, if the model has them: 1 in the second text of a pair.
    """
    batch = as_batch("source", tokens, lengths)
    if types is not None:
        batch["source_types"] = types
    return build(params).class_logits(batch, head_gates=gates)


def score_program(build, gates, params, *texts):
    """Compute the log-probability of every token, B T; 0 after a text's end.

    Args:
        texts: tokens, B S, and lengths, B, of the source if there is one, then those
            of the target.
    """
    model, batch = build(params), {}
    sides = ("source", "target") if model.encoder else ("target",)
    for side, tokens, lengths in zip(sides, texts[::2], texts[1::2], strict=True):
        batch |= as_batch(side, tokens, lengths)
    logits = model(batch, head_gates=gates)
    log_probs = jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["target"][..., None], axis=-1
    )
    return jnp.where(batch["target_segments"] > 0, log_probs[..., 0], 0.0)


def prefill_program(build, gates, params, prompts, lengths) -> dict:
    """Prefill prompts; return `decoding.step.Prompt` as a dict."""
    return decoding.prefill(build(params), prompts, lengths, gates)._asdict()


def empty_cache(build, params, slots) -> list:
    """Return a cache of zeros, whose size is that of `slots`, B L."""
    model = build(params)
    B, L = slots.shape
    x = jnp.zeros((B, L, model.width))
    return [
        [
            jnp.zeros_like(array)
            for array in decoding.entries(layer.self_attention, x)[0]
        ]
        for layer in model.decoder
    ]


def step_program(build, gates, params, prompt, cache, token, number):
    """Compute the logits of the next token, B vocab, and the extended cache.

    Args:
        prompt: the result of `prefill`.
        cache: the previous step's cache; zeros at first.
        token: the previous token, B; `prompt["first"]` at first.
        number: number of previous steps.
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
    state = decoding.State(number, rows, [tuple(arrays) for arrays in cache])
    hidden, cache = decoding.next_hidden(model, state, gates)
    return model.logits(hidden)[:, 0], [list(arrays) for arrays in cache]
