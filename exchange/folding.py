"""Convert models to what other libraries support: concat, 1 / sqrt(H) and no gates.

Factors that are linear in the heads are folded into the output kernel, in float64. A
setting that a format can't express raises an error that names the config key.
Parameters are NumPy arrays by path, as returned by `huggingface.named`.
"""

import jax.numpy as jnp
import numpy as np

from headcount.attention.variants import LEARNED, hard_concrete
from headcount.configs.base import get_config
from headcount.configs.sites import layers_of
from headcount.models.attention import head_shape
from headcount.models.positions import SINUSOIDAL, sinusoidal
from headcount.models.transformer import attention_arguments

STACKS = {  # by site: stack of layers, and the attention's name within a layer
    "encoder": ("encoder", "self_attention"),
    "decoder": ("decoder", "self_attention"),
    "cross": ("decoder", "cross_attention"),
}
# Keys of a section that only affect training or the choice of implementation.
START = ("merge_gain", "init", "dropout", "implementation", "mixture_heads", "qk_clip")
# Keys of model.attention that `plain_heads` folds or that all formats can express.
HEADS = ("num_heads", "use_bias", "merge", "scale")


def plain_heads(config, params: dict, gates: dict) -> dict:
    """Return parameters of an equivalent model with the rule concat and no gates.

    Args:
        config: the run's config.
        params: parameters by path.
        gates: the trial's fixed head gates by site, L N.

    Raises:
        ValueError: the merge rule of a layer is not linear in the heads.
    """
    params = dict(params)
    for site, num_layers in layers_of(config.model).items():
        (stack, name), settings = STACKS[site], site_settings(config, site)
        path = settings["path"]
        for index in range(num_layers):
            layer = f"{stack}.{index}.{name}"
            key = f"{layer}.merge.kernel"
            num_heads = params[f"{layer}.query"].shape[1]
            merge_names = [x for x in params if x.startswith(f"{layer}.merge.")]
            extra = {
                x.rsplit(".", 1)[1]: np.float64(params.pop(x)) for x in merge_names
            }
            kernel = concat_kernel(settings["merge"], extra, num_heads, path)
            if site in gates:
                kernel = kernel * np.float64(gates[site][index])[:, None, None]
            params[key] = kernel.astype(np.float32)
            if settings["gate"] == LEARNED:
                learned = hard_concrete(
                    jnp.asarray(params.pop(f"{layer}.output_gate.kernel"))
                )
                params[key] = params[key] * np.asarray(learned)[:, None, None]
            if settings["scale"] is not None:
                fold_scale(params, layer, settings["scale"])
    return params


def concat_kernel(rule: str, params: dict, num_heads: int, path: str) -> np.ndarray:
    """Return the kernel N V D with which concat is equivalent to a rule.

    Raises:
        ValueError: the rule is not linear in the heads.
    """
    kernel = params["kernel"]
    if rule == "concat":
        return kernel
    if rule == "scaled":
        return kernel * (1 + params["scale"])[:, None, None]
    if rule == "mean":
        return np.broadcast_to(kernel / num_heads, (num_heads, *kernel.shape))
    if rule == "weighted":
        weights = np.exp(params["logits"] - params["logits"].max())
        return (weights / weights.sum())[:, None, None] * kernel
    raise ValueError(
        f"{path}.merge must be concat, scaled, mean or weighted to be exported, got "
        f"{rule!r}, which is not known to be linear in the heads."
    )


def ungrouped(params: dict) -> dict:
    """Repeat the parameters of keys and values for each query head of a group."""
    params = dict(params)
    for name in [x for x in params if x.endswith("_attention.query")]:
        layer, num_heads = name.removesuffix(".query"), params[name].shape[1]
        for part, axis in (
            ("key", 1),
            ("value", 1),
            ("key_bias", 0),
            ("value_bias", 0),
        ):
            array = params.get(f"{layer}.{part}")
            if array is not None:
                times = num_heads // array.shape[axis]
                params[f"{layer}.{part}"] = np.repeat(array, times, axis)
    return params


def fold_scale(params: dict, layer: str, scale: float) -> None:
    """Scale the queries so that dividing logits by sqrt(H) gives the layer's scale."""
    head_dim = params[f"{layer}.query"].shape[-1]
    normed = f"{layer}.query_norm.scale"
    names = [normed] if normed in params else [f"{layer}.query", f"{layer}.query_bias"]
    for name in names:
        if name in params:
            wide = params[name].astype(np.float64) * scale * head_dim**0.5
            params[name] = wide.astype(np.float32)


def position_tables(config, params: dict, rows: int) -> dict[str, np.ndarray]:
    """Return by stack the table of vectors, of size D, added to embeddings.

    Args:
        config: the run's config.
        params: parameters by path.
        rows: number of positions, except for learned tables.
    """
    tables, width = {}, config.model.width
    for stack in ("encoder", "decoder"):
        if not config.model[f"num_{stack}_layers"]:
            continue
        if config.model.positions == "learned":
            tables[stack] = params[f"{stack}_positions"]
        elif config.model.positions in SINUSOIDAL:
            tables[stack] = sinusoidal(rows, width, config.model.positions)
        else:
            tables[stack] = np.zeros((rows, width), np.float32)
    return tables


def site_settings(config, site: str) -> dict:
    """Return the arguments of a site's attention, including its config `path`."""
    model = config.model.to_dict()
    return attention_arguments(site, model["attention"], model[f"{site}_attention"])


def head_sizes(config, site: str) -> tuple[int, int, int, int]:
    """Return N, K, H and V of a site."""
    of = site_settings(config, site)
    names = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "path")
    sizes = {name: of[name] for name in names}
    return of["num_heads"], *head_shape(config.model.width, **sizes)


def check_plain(config, target: str, model: tuple, heads: tuple) -> None:
    """Raise a ValueError for a setting that a format can't express.

    All keys that are not known to be supported must have their defaults, so that
    variants that are added later are not silently dropped.

    Args:
        config: the run's config.
        target: the format's name, for the error.
        model: keys of config.model that the format can express.
        heads: keys of config.model.attention that it can express, besides `HEADS`.
    """
    defaults = get_config().model.to_dict()
    known = {*model, "width", "mlp_dim", "num_encoder_layers", "num_decoder_layers"}
    known |= {"dropout", "dtype", "bos"}
    sections = {f"{site}_attention" for site in STACKS} | {"attention"}
    mine = config.model.to_dict()
    for key, value in mine.items():
        if key not in known | sections and value != defaults[key]:
            refuse(target, f"model.{key}", defaults[key], value)
    for site in layers_of(config.model):
        settings = site_settings(config, site)
        path = settings.pop("path")
        if settings["gate"] == LEARNED:  # `plain_heads` folds it
            for key in ("gate", "gate_features", "gate_penalty"):
                del settings[key]
        for key, value in settings.items():
            default = defaults["attention"][key]
            if key not in (*HEADS, *START, *heads) and value != default:
                refuse(target, f"{path}.{key}", default, value)


def refuse(target: str, key: str, supported, got) -> None:
    """Raise a ValueError that says which value a format needs for a config key."""
    raise ValueError(
        f"{key} must be {supported} for {target}, which supports nothing else; got "
        f"{got}."
    )


def require(config, target: str, **wanted) -> None:
    """Raise a ValueError unless keys of config.model have one of these values."""
    for key, values in wanted.items():
        if config.model[key] not in values:
            text = " or ".join(map(str, values))
            refuse(target, f"model.{key}", text, config.model[key])
