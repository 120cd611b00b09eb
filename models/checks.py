"""What settings and arguments must be, in sentences that name the config's keys."""

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


def choose(name: str, value: str, choices) -> None:
    """Raise a ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


def check_counts(config: dict) -> None:
    """Raise a ValueError unless what a (flat) config counts is 1 or more, in 32 bits.

    And unless what it divides by is above 0.
    """
    for key in COUNTS:
        if config[key] is not None and not 1 <= config[key] < 2**31:
            wanted = "at least 1" if config[key] < 1 else "below 2^31"
            raise ValueError(f"{key} must be {wanted}, got {config[key]}.")
    epsilon = config["model.norm_epsilon"]
    if not 0 < epsilon < float("inf"):
        raise ValueError(
            f"model.norm_epsilon must be above 0 and finite, got {epsilon}."
        )


def check_bos(bos: int, vocab_size: int) -> None:
    """Raise a ValueError unless the id is one of the vocabulary."""
    if not 0 <= bos < vocab_size:
        raise ValueError(
            f"model.bos must be from 0 to below {vocab_size}, the pieces of the "
            f"vocabulary, got {bos}."
        )


def check_layers(
    num_encoder_layers: int, num_decoder_layers: int, encoder_only: dict
) -> None:
    """Raise a ValueError unless there is a layer, of an encoder alone where need be.

    `encoder_only` are settings by name that are off, or of an encoder-only model.
    """
    counts = num_encoder_layers, num_decoder_layers
    if min(counts) < 0 or counts == (0, 0):
        raise ValueError(
            "model.num_encoder_layers and model.num_decoder_layers must be at least 0 "
            f"and one of them above it, got {counts[0]} and {counts[1]}."
        )
    for name, value in encoder_only.items():
        if value < 0:
            raise ValueError(f"model.{name} must be at least 0, got {value}.")
        if value and num_decoder_layers:
            raise ValueError(
                f"model.{name} is for encoder-only models: model.num_decoder_layers "
                f"must be 0 with model.{name}={value}, got {num_decoder_layers}."
            )


def check_encoder_decoder(model: dict) -> None:
    """Raise a ValueError unless the settings (`config.model`) are of a translator."""
    counts = model["num_encoder_layers"], model["num_decoder_layers"]
    if 0 in counts:
        raise ValueError(
            "Only encoder-decoder models can be trained, scored and translate here: "
            "model.num_encoder_layers and model.num_decoder_layers must be at least 1, "
            f"got {counts[0]} and {counts[1]}."
        )


def check_rotary(layers, path: str) -> None:
    """Raise a ValueError where a head of self-attention has no halves to rotate."""
    for layer in layers:
        size = layer.self_attention.query.shape[-1]
        if size % 2:
            raise ValueError(
                f"{path}.head_dim must be even with model.positions='rotary', got "
                f"{size}."
            )


def check_gates(head_gates: dict | None, like: dict) -> None:
    """Raise a ValueError unless the gates have the sites, layers and heads of like."""
    for site, gates in (head_gates or {}).items():
        if site not in like:
            raise ValueError(f"head_gates may have {', '.join(like)}, got {site!r}.")
        L, N = like[site].shape
        if gates.ndim not in (2, 3) or (gates.shape[0], gates.shape[-1]) != (L, N):
            raise ValueError(
                f"head_gates[{site!r}] must be {L} layers by {N} heads, or layers by "
                f"rows by heads, got {gates.shape}."
            )


def check_positions(model: dict, max_length: int) -> None:
    """Raise a ValueError where sentences may be longer than the learned positions."""
    there = model["max_positions"]
    if model["positions"] == "learned" and max_length > there:
        raise ValueError(
            f"model.max_positions must be at least data.max_length = {max_length} with "
            f"model.positions='learned', got {there}."
        )
