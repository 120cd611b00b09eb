"""Sites of attention: the encoder's self-, the decoder's self- and its cross-attention.

A model tells them apart as "encoder", "decoder" and "cross", a layer as "self" and
"cross".
"""


def at_site(site: str, attention: dict, own: dict | None) -> dict:
    """The attention arguments of a site: its own where set, else those of all."""
    own = {key: value for key, value in (own or {}).items() if value is not None}
    path = f"model.{site}_attention" if own else "model.attention"
    return attention | own | {"path": path}


def gates_of(head_gates: dict | None, layer: int, **sites: str) -> dict:
    """The gates of a layer, by its own names of the sites that have some."""
    given = head_gates or {}
    return {name: given[site][layer] for name, site in sites.items() if site in given}


def watch_of(watch: dict | None, **sites: str) -> dict:
    """What watches a layer, by its own names of the sites that are watched."""
    given = watch or {}
    return {name: given[site] for name, site in sites.items() if site in given}


def implementations(model, spec: dict) -> dict[str, str]:
    """Which attention implementation each site of a (abstract) model runs, by size.

    Raises:
        NotImplementedError: one that was named can't, with the reason.
    """
    B = next(iter(spec.values())).shape[0]
    S, T = (spec[x].shape[1] if x in spec else 0 for x in ("source", "target"))
    relative = model.positions == "relative"
    both = model.decoder if model.encoder else ()
    sites = {
        "encoder": (model.encoder, "self_attention", S, S, relative),
        "decoder": (model.decoder, "self_attention", T, T, relative),
        "cross": (both, "cross_attention", T, S, False),
    }
    return {
        site: getattr(layers[0], name).resolve(
            B, *lengths, dtype=model.dtype, has_bias=has_bias
        )
        for site, (layers, name, *lengths, has_bias) in sites.items()
        if layers
    }
