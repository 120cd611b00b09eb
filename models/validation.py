"""Checks of a model's settings and arguments; errors name the config key."""


def check_layers(
    num_encoder_layers: int, num_decoder_layers: int, encoder_only: dict
) -> None:
    """Raise a ValueError unless there are layers that fit the settings.

    Args:
        num_encoder_layers, num_decoder_layers: how many of each.
        encoder_only: settings by name that only an encoder-only model may use.
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


def check_rotary(layers, path: str) -> None:
    """Raise a ValueError if a head of self-attention can't be rotated in halves."""
    for layer in layers:
        size = layer.self_attention.query.shape[-1]
        if size % 2:
            raise ValueError(
                f"{path}.head_dim must be even with model.positions='rotary', got "
                f"{size}."
            )


def check_gates(head_gates: dict | None, like: dict) -> None:
    """Raise a ValueError unless gates have the sites, layers and heads of `like`."""
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
    """Raise a ValueError if examples may be longer than the learned positions."""
    there = model["max_positions"]
    if model["positions"] == "learned" and max_length > there:
        raise ValueError(
            f"model.max_positions must be at least data.max_length = {max_length} with "
            f"model.positions='learned', got {there}."
        )


def check_bos(bos: int, vocab_size: int) -> None:
    """Raise a ValueError unless the id is in the vocabulary."""
    if not 0 <= bos < vocab_size:
        raise ValueError(
            f"model.bos must be from 0 to below {vocab_size}, the size of the "
            f"vocabulary, got {bos}."
        )
