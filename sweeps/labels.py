"""Short names of arms and settings: N=8, encoder N=8, mean, equal parameters."""

import re

MATCH = "match"  # the key of an arm that names the budget it shares with the baseline
# keys whose values need no name of the key
SELF_EXPLANATORY = "merge", "name", "positions"
LETTERS = {
    "width": "D",
    "mlp_dim": "F",
    "num_heads": "N",
    "num_kv_heads": "K",
    "head_dim": "H",
    "value_dim": "V",
    "mixture_heads": "k",
}


def name_arms(arms: list[dict]) -> tuple[list[str], str | None]:
    """Return short, distinct names of arms, and the key they vary if it is numeric.

    Settings that are not needed to tell the arms apart are left out, starting from the
    last.

    Args:
        arms: overrides by config key.
    """
    keys = list(dict.fromkeys(key for arm in arms for key in arm))

    def names(keys, form=label):
        return [", ".join(form(k, arm[k]) for k in keys if k in arm) for arm in arms]

    if len(set(names(keys))) < len(arms):  # short names are ambiguous
        return names(keys, "{}={}".format), None
    for key in reversed(keys):
        fewer = [k for k in keys if k != key]
        shorter = names(fewer)
        has_unnamed = any(
            arm and not name for arm, name in zip(arms, shorter, strict=True)
        )
        if fewer and len(set(shorter)) == len(arms) and not has_unnamed:
            keys = fewer
    values = [arm[keys[0]] for arm in arms if keys[0] in arm] if len(keys) == 1 else []
    are_numbers = all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values
    )
    axis = keys[0] if are_numbers and len(values) == len(arms) else None
    return [name or "baseline" for name in names(keys)], axis


def label(key: str, value) -> str:
    """Format a setting as it appears in the name of an arm."""
    if key == MATCH:
        return f"equal {value}"
    if key.rsplit(".", 1)[-1] in SELF_EXPLANATORY:
        return f"{site_prefix(key)}{value}"
    number = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{symbol(key)}={number}"


def symbol(key: str) -> str:
    """Return a key's letter or last part, prefixed by the attention site if any."""
    last = key.rsplit(".", 1)[-1]
    return site_prefix(key) + LETTERS.get(last, last)


def site_prefix(key: str) -> str:
    """Return "encoder " for model.encoder_attention.*, and so on; else ""."""
    match = re.search(r"\b(\w+)_attention\.", key)
    return f"{match.group(1)} " if match else ""
