"""Character-level Shakespeare with a modern block (2023 to 2026) instead of GPT-2's.

    python train.py --config=configs/modern.py:short --workdir=runs/modern
    python eval.py --workdir=runs/modern --split=val

The block has pre-norm RMSNorm, rotary positions, SwiGLU, RMS-normalised queries and
keys, an untied output table, and no biases. The feed-forward is 8/3 D wide, which gives
it as many parameters as a plain one of 4 D. Data, sizes and optimizer are those of
configs/shakespeare.py, so that only the block differs. With `:short`, a learning rate
of 0.004 and data.test_share=0.5, 16 seeds had a test loss of 1.6713 ± 0.0083 (two cores
of an Intel Xeon and of an AMD EPYC, 2026-11-25 to 28, results/variants_shakespeare).
To use Muon and a schedule with warmup, stable phase and decay, as is common for such
models:

    python train.py --config=configs/modern.py:short --workdir=runs/muon \\
      --config.optimizer.name=muon --config.optimizer.schedule=warmup_stable_decay
"""

from headcount.configs import shakespeare


def get_config(recipe: str = "full"):
    """Return `:full` or `:short` of configs/shakespeare.py with the modern block."""
    if recipe not in ("full", "short"):
        raise ValueError(f"configs/modern.py has :full and :short, not :{recipe}")
    config = shakespeare.get_config(recipe)
    config.model.positions = "rotary"
    config.model.norm_type = "rms_norm"
    config.model.mlp = "gated"
    config.model.activation = "silu"
    config.model.mlp_dim = {"full": 1024, "short": 344}[recipe]
    config.model.tie_embeddings = False
    config.model.attention.qk_norm = True
    return config
