"""Checks of a model's settings and arguments; errors name the config key."""

from headcount.attention.variants import GATES, LEARNED
from headcount.configs.sites import at_site, layers_of


def check_layers(
    num_encoder_layers: int,
    num_decoder_layers: int,
    encoder_only: dict,
    overrides: dict,
) -> None:
    """Raise a ValueError if the numbers of layers are invalid or don't fit settings.

    Args:
        num_encoder_layers, num_decoder_layers: numbers of layers.
        encoder_only: settings by name that only encoder-only models may use.
        overrides: arguments of attention by site, of those that differ there.
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
                f"must be 0 with model.{name}={value}."
            )
    stacks = {"num_encoder_layers": counts[0], "num_decoder_layers": counts[1]}
    sites = layers_of(stacks)
    for site, settings in overrides.items():
        for key, value in (settings or {}).items():
            if value is not None and site not in sites:
                raise ValueError(
                    f"model.{site}_attention.{key}={value} has no effect, because the "
                    f"model has no such attention. Set model.attention.{key}."
                )


# Variants that exclude each other: a setting, the other setting, and the reason.
EXCLUSIVE = (
    ("sink", "talking_heads", "whose mixed maps do not belong to single heads"),
    ("talking_heads", "differential", "whose maps belong to pairs of heads"),
    ("differential", "latent_dim", "whose values are not kept by a cache"),
    ("value_residual", "latent_dim", "whose values are not kept by a cache"),
    ("qk_norm", "latent_dim", "whose keys are not kept by a cache"),
    ("qk_norm", "qk_clip", "as normalised logits do not depend on the kernels' size"),
    ("talking_heads", "qk_clip", "whose logits are mixtures of heads"),
)


def check_variants(s: dict) -> None:
    """Raise a ValueError if attention variants don't fit each other or the heads.

    Args:
        s: the arguments of `Attention` by name; K and H are not None.
    """
    path, rotary = s["path"], s["rotary"]

    def require(holds, name, must, reason=""):
        if not holds:
            raise ValueError(f"{path}.{name} must be {must}, got {s[name]}{reason}.")

    def is_on(name):
        return s[name] not in (None, False, "none")

    for name, other, reason in EXCLUSIVE:
        if is_on(name) and is_on(other):
            raise ValueError(f"{path}.{name} can't be used with {other}, {reason}.")
    # the square of a gain must fit into float32
    require(1e-18 <= s["merge_gain"] <= 1e18, "merge_gain", "from 1e-18 to 1e18")
    require(s["scale"] is None or 0 <= s["scale"] <= 1e6, "scale", "from 0 to 1e6")
    require(0 <= s["dropout"] < 1, "dropout", "from 0 to below 1")
    if s["implementation"] in ("xla", "cudnn"):
        condition = f"with implementation={s['implementation']!r}"
        require(not s["dropout"], "dropout", f"0 {condition}, which has none")
        require(
            s["qk_clip"] is None, "qk_clip", f"None {condition}, without statistics"
        )
    check_mixture(s)
    features, width = s["gate_features"], s["width"]
    require(
        features is None or 0 <= features <= width,
        "gate_features",
        f"from 0 to model.width = {width}",
    )
    if s["gate"] == LEARNED:
        for name, must in (
            ("gate_features", 0),
            ("gate_size", "head"),
            ("gate_on", "output"),
        ):
            require(s[name] == must, name, f"{must!r} with gate={LEARNED!r}")
    require(s["gate_penalty"] >= 0, "gate_penalty", "at least 0")
    require(
        s["gate"] == LEARNED or not s["gate_penalty"],
        "gate_penalty",
        f"0 with gate={s['gate']!r}, which can't close",
    )
    if s["is_cross"] and s["exclusive"]:
        raise ValueError(
            f"{path}.exclusive is for self-attention: in cross-attention a query has "
            f"no value of its own; set model.cross_attention.exclusive=False."
        )
    if s["differential"]:
        for name in ("num_heads", "num_kv_heads"):
            require(s[name] % 2 == 0, name, "even with differential, for pairs")
    balanced = s["merge"] in ("mixture", "shared_mixture")
    require(s["mixture_balance"] >= 0, "mixture_balance", "at least 0")
    require(
        balanced or not s["mixture_balance"],
        "mixture_balance",
        f"0 with merge={s['merge']!r}, which routes nothing",
    )
    require(s["qk_clip"] is None or s["qk_clip"] > 0, "qk_clip", "above 0")
    for name in ("knocking_all", "knocking_shared"):
        require(
            s["knocking"] != "none" or not s[name], name, "False with knocking='none'"
        )
    if s["latent_dim"] is None:
        require(s["latent_norm"], "latent_norm", "True without latent_dim")
        require(
            s["latent_rotary_dim"] is None,
            "latent_rotary_dim",
            "None without latent_dim",
        )
        size = s["head_dim"] if s["rotary_dim"] is None else s["rotary_dim"]
        name = "head_dim" if s["rotary_dim"] is None else "rotary_dim"
        if s["rotary_dim"] is not None and not s["is_cross"]:
            require(rotary, name, "None without model.positions='rotary'")
            most = s["head_dim"]
            require(2 <= size <= most, name, f"from 2 to head_dim = {most}")
        if rotary or name == "rotary_dim":
            require(size % 2 == 0, name, "even with model.positions='rotary'")
        return
    require(s["latent_dim"] >= 1, "latent_dim", "at least 1")
    require(
        s["num_kv_heads"] == s["num_heads"],
        "num_kv_heads",
        f"num_heads = {s['num_heads']} with latent_dim",
    )
    require(s["rotary_dim"] is None, "rotary_dim", "None with latent_dim")
    require(s["knocking"] == "none", "knocking", "'none' with latent_dim")
    require(
        s["gate"] == "none" or s["gate_on"] == "output",
        "gate_on",
        "'output' with latent_dim",
    )
    size = s["latent_rotary_dim"]
    if rotary:
        size = s["head_dim"] // 2 if size is None else size
        require(
            size >= 2 and size % 2 == 0,
            "latent_rotary_dim",
            "even and at least 2 with model.positions='rotary'",
            f"; by default it is half of head_dim = {s['head_dim']}",
        )
    elif not s["is_cross"]:
        require(
            size in (None, 0),
            "latent_rotary_dim",
            "0 or None unless self-attention has rotary positions",
        )


def check_mixture(s: dict) -> None:
    """Raise a ValueError if a mixture's counts don't fit the heads (or pairs)."""
    path, pairs = s["path"], 2 if s["differential"] else 1
    N, chosen, shared = s["num_heads"] // pairs, s["mixture_heads"], s["mixture_shared"]
    most = f"num_heads = {N}" if pairs == 1 else f"num_heads / {pairs} = {N}"
    if s["merge"] == "mixture" and not 1 <= chosen <= N:
        raise ValueError(
            f"{path}.mixture_heads must be from 1 to {most}, got {chosen}."
        )
    if s["merge"] == "shared_mixture" and not (
        1 <= shared < N and 1 <= chosen <= N - shared
    ):
        raise ValueError(
            f"{path}.mixture_shared and mixture_heads must be at least 1 and their sum "
            f"at most {most}, got {shared} and {chosen}."
        )


def check_gates(head_gates: dict | None, expected: dict) -> None:
    """Raise a ValueError if gates don't match the sites and shapes of `expected`."""
    for site, gates in (head_gates or {}).items():
        if site not in expected:
            raise ValueError(
                f"head_gates may have {', '.join(expected)}, got {site!r}."
            )
        L, N = expected[site].shape
        if gates.ndim not in (2, 3) or (gates.shape[0], gates.shape[-1]) != (L, N):
            raise ValueError(
                f"head_gates[{site!r}] must be {L} layers by {N} heads, or layers by "
                f"rows by heads, got {gates.shape}."
            )


def check_positions(model: dict, max_length: int) -> None:
    """Raise a ValueError if examples can be longer than the learned positions."""
    max_positions = model["max_positions"]
    if model["positions"] == "learned" and max_length > max_positions:
        raise ValueError(
            f"model.max_positions must be at least data.max_length = {max_length} with "
            f"model.positions='learned', got {max_positions}."
        )


# Keys of attention that only work with another: its name and its values.
_GATED = "gate", (*GATES, LEARNED)
NEEDS = {
    "gate_size": _GATED,
    "gate_features": _GATED,
    "gate_on": _GATED,
    "mixture_heads": ("merge", ("mixture", "shared_mixture")),
    "mixture_shared": ("merge", ("shared_mixture",)),
}


def check_unused(model: dict, defaults: dict) -> None:
    """Raise a ValueError if a setting of attention has no effect.

    Args:
        model: the section of the config.
        defaults: arguments of attention that no config has set.
    """
    sections = [f"{site}_attention" for site in layers_of(model)]
    settings = {name: at_site(model["attention"], model[name]) for name in sections}
    for key, (needed, values) in NEEDS.items():
        used = {
            name: site_settings[needed] in values
            for name, site_settings in settings.items()
        }
        used["attention"] = any(used.values())
        for section, is_used in used.items():
            value = model[section][key]
            if not is_used and value not in (None, defaults[key]):
                raise ValueError(
                    f"model.{section}.{key}={value} has no effect without "
                    f"model.{section}.{needed}={' or '.join(values)}."
                )
    for key in ("rotary_dim", "latent_rotary_dim"):
        if value := model["cross_attention"][key]:
            raise ValueError(
                f"model.cross_attention.{key}={value} has no effect: rotary positions "
                f"are for self-attention. Set it in model.encoder_attention or "
                f"model.decoder_attention."
            )


def check_residual(model: dict) -> None:
    """Raise a ValueError if value residuals are on where no stack has two layers."""
    on = {}  # number of layers, by section that turns them on
    for site, count in layers_of(model).items():
        site_settings = model[f"{site}_attention"]
        if at_site(model["attention"], site_settings)["value_residual"]:
            is_own = site_settings["value_residual"] is not None
            section = f"{site}_attention" if is_own else "attention"
            on[section] = max(count, on.get(section, 0))
    for section, count in on.items():
        if count < 2:
            raise ValueError(
                f"model.{section}.value_residual must be False in stacks of one layer, "
                f"which have no earlier values to mix in."
            )


def check_clip(positions: str, attentions: dict[str, dict]) -> None:
    """Raise a ValueError if QK clip is on where it can't limit the logits.

    Args:
        positions: the model's kind of positions.
        attentions: arguments of self-attention, by site.
    """
    for site, arguments in attentions.items():
        if positions == "relative" and arguments.get("qk_clip") is not None:
            raise ValueError(
                f"{arguments['path']}.qk_clip can't be used with model.positions="
                f"'relative' in the {site}, because scaling queries and keys does not "
                f"scale the learned biases in the logits."
            )


def check_bos(bos: int, vocab_size: int) -> None:
    """Raise a ValueError if the id is not in the vocabulary."""
    if not 0 <= bos < vocab_size:
        raise ValueError(
            f"model.bos must be from 0 to below {vocab_size}, the size of the "
            f"vocabulary, got {bos}."
        )
