"""Attention sites: the self-attention of each stack, and cross-attention."""

SITES = ("encoder", "decoder", "cross")


def layers_of(model) -> dict[str, int]:
    """Return the number of layers of every site that a model has.

    Args:
        model: the config's section `model`.
    """
    encoder, decoder = model["num_encoder_layers"], model["num_decoder_layers"]
    counts = (encoder, decoder, decoder if encoder else 0)
    return {site: n for site, n in zip(SITES, counts, strict=True) if n}


def at_site(general: dict, overrides: dict | None) -> dict:
    """Return the settings of a site: its own or, where they are None, the general ones.

    Args:
        general: the section model.attention.
        overrides: the site's section, of which keys may be missing.
    """
    return general | {k: v for k, v in (overrides or {}).items() if v is not None}
