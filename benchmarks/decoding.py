"""Compare the speed of greedy decoding and beam search with CTranslate2 (float32).

    .venv-peers/bin/python -m benchmarks.decoding [--workdir=DIR] [--rounds=5]
        [--threads=2] [--beam_sizes 1 5]

Both sides have the same parameters. With --workdir, these are the best checkpoint of a
trained run, which translates its dev set. Otherwise they are random, for
Transformer-Tiny (4 + 4 layers, D 128, F 256, N 4, 8000 tokens), and the sentences are
about as long as those of Multi30k's dev set. A random model never generates EOS, so all
translations have exactly LENGTH tokens. Ours then end with EOS, whose probability
counts, and CTranslate2's don't, so beam search may prefer another translation.

This prints sentences per second (median, smallest and largest over the rounds), the
ratio, the share of the machine's matmul ceiling (the best of NumPy and XLA at 2048 x
2048 x 2048), and the share of equal translations. CTranslate2 is timed twice: with all
threads for one batch, and with one batch per thread, like ours. The sides take turns in
one process, and a pause before each turn lets the threads of the previous side sleep.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.training import ceiling_of, numpy_ceiling
from headcount.configs import multi30k
from headcount.decoding.generate import generate
from headcount.exchange import ctranslate2_format, folding, huggingface
from headcount.models.transformer import Transformer
from headcount.training.run import load

LONGEST = 127  # maximum tokens of a trained model's translation, without EOS
# tokens with EOS: about the mean of Multi30k's dev set with a vocabulary of 8000
LENGTH = 15
# CTranslate2 divides by length^PENALTY, ours by ((5 + length) / 6)^PENALTY.
PENALTY = 0.6


def main():
    """Build both sides, compare their outputs, and time them in turn."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beam_sizes", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--no_peer", action="store_true", help="time only ours")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])

    config, model, sentences, forced = trained(arguments.workdir)
    print(f"{len(sentences)} sentences, {sum(map(len, sentences))} source tokens")
    top = ceiling()
    print(f"matmul ceiling: {top / 1e9:.0f} GFLOP/s\n")
    sides = {"ours": ours(model, forced)}
    if not arguments.no_peer:
        sides["CTranslate2"] = peer(config, model, forced, 1, arguments.threads)
        if arguments.threads > 1:
            per_thread = peer(config, model, forced, arguments.threads, 1)
            sides["CTranslate2, a batch per thread"] = per_thread
    print("| | beam | sentences/s | spread | share of ceiling | speedup | same |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for beam_size in arguments.beam_sizes:
        outputs = {name: side(sentences, beam_size) for name, side in sides.items()}
        rates = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                time.sleep(0.5)
                begin = time.perf_counter()
                side(sentences, beam_size)
                rates[name].append(len(sentences) / (time.perf_counter() - begin))
        cost = flop(model, sentences, outputs["ours"], beam_size) / len(sentences)
        mine = statistics.median(rates["ours"])
        for name, speeds in rates.items():
            rate = statistics.median(speeds)
            same = sum(map(list.__eq__, outputs[name], outputs["ours"]))
            print(
                f"| {name} | {beam_size} | {rate:.0f} | {min(speeds):.0f} to "
                f"{max(speeds):.0f} | {rate * cost / top:.0%} | {mine / rate:.2f} "
                f"| {same / len(sentences):.1%} |"
            )


def trained(workdir: Path | None):
    """Return a config, its model, source sentences, and the length to force or None."""
    if workdir is not None:
        run = load(workdir, "best")
        encoded = [ids.tolist() for ids in run.task.load("val").fields["source"]]
        return run.config, nnx.merge(run.graph, run.of(0)[0]), encoded, None
    random = np.random.default_rng(0)
    lengths = np.clip(random.normal(14.5, 4.0, 1014).round(), 5, 35).astype(int)
    sentences = [[*random.integers(4, 8000, n - 1).tolist(), 2] for n in lengths]
    config = multi30k.get_config()
    model = Transformer(8000, **config.model.to_dict(), rngs=nnx.Rngs(0))
    # make sure that EOS is never the most probable token
    model.embedding[...] = model.embedding[...].at[2].set(0.0)
    return config, model, sentences, LENGTH


def ours(model, forced: int | None):
    """Return a function that translates with `decoding.generate`."""
    graph, params = nnx.split(model)

    def side(sentences, beam_size):
        options = {"beam_size": beam_size, "length_penalty": PENALTY}
        options["return_scores"] = False  # like eval.py, and CTranslate2's default
        limits = [forced or LONGEST + 1] * len(sentences)
        return generate(graph, params, sentences, limits=limits, **options)[0]

    return side


def peer(config, model, forced: int | None, batches: int, threads: int):
    """Return a function that translates with CTranslate2 and the model's parameters.

    Args:
        batches: number of batches to translate at the same time.
        threads: threads per batch.
    """
    import ctranslate2

    folder = tempfile.mkdtemp()
    params = huggingface.named(jax.device_get(nnx.split(model)[1]))
    params = folding.plain_heads(config, params, {})
    pieces = ["<pad>", "<s>", "</s>", *map(str, range(3, len(model.embedding)))]
    ctranslate2_format.write(config, params, [pieces], Path(folder))
    translator = ctranslate2.Translator(
        folder,
        device="cpu",
        compute_type="float32",
        inter_threads=batches,
        intra_threads=threads,
    )
    limit = {"max_decoding_length": LONGEST}
    if forced:
        # CTranslate2's limit excludes EOS, which is never generated here.
        limit = {"max_decoding_length": forced, "min_decoding_length": forced}

    def side(sentences, beam_size):
        results = translator.translate_batch(
            [[*map(str, text[:-1]), "</s>"] for text in sentences],
            beam_size=beam_size,
            length_penalty=PENALTY,
            max_batch_size=32 if beam_size > 1 else 128,
            **limit,
        )
        cut = forced - 1 if forced else None  # our last token is EOS
        return [[int(piece) for piece in x.hypotheses[0][:cut]] for x in results]

    return side


def flop(model, sentences, translations, beam_size: int) -> float:
    """Return the FLOPs of the matrix products, without padding and attention."""

    def numbers(layers):
        return sum(leaf.size for leaf in jax.tree.leaves(parameters(layers)))

    def parameters(layers):
        return nnx.state(layers, nnx.Param)

    source = sum(map(len, sentences))
    target = sum(len(text) + 1 for text in translations) * beam_size
    keys = sum(
        layer.cross_attention.key.size + layer.cross_attention.value.size
        for layer in model.decoder
    )  # projections of the source, once per sentence
    per_target = numbers(model.decoder) - keys + model.embedding.size
    return 2 * (source * (numbers(model.encoder) + keys) + target * per_target)


def ceiling() -> float:
    """Return the FLOP/s of 2048 x 2048 matrix products, the best of NumPy and XLA."""
    x, product = jnp.ones((2048, 2048)), jax.jit(jnp.matmul)
    xla = ceiling_of(lambda: product(x, x).block_until_ready())
    return max(numpy_ceiling(), xla)


if __name__ == "__main__":
    main()
