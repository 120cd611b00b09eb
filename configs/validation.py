"""Checks of config values that any script needs; errors name the key."""

COUNTS = (
    "data.vocab_size",
    "data.max_length",
    "data.batch_tokens",
    "model.width",
    "model.mlp_dim",
    "model.max_positions",
    "train.num_steps",
    "train.steps_per_dispatch",
    "train.log_every_steps",
    "train.eval_every_steps",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
    "train.patience",
)


def choose(name: str, value, choices) -> None:
    """Raise a ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


def check_counts(config: dict) -> None:
    """Raise a ValueError unless a flat config's counts are from 1 to 2^31 - 1."""
    for key in COUNTS:
        if config[key] is not None and not 1 <= config[key] < 2**31:
            wanted = "at least 1" if config[key] < 1 else "below 2^31"
            raise ValueError(f"{key} must be {wanted}, got {config[key]}.")
    epsilon = config["model.norm_epsilon"]
    if not 0 < epsilon < float("inf"):
        raise ValueError(
            f"model.norm_epsilon must be above 0 and finite, got {epsilon}."
        )
