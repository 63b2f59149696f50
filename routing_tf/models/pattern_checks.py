"""Checks of patterns against the other hyperparameters."""

from routing_tf.files.names import did_you_mean
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.models import patterns

# Hyperparameters that heads may refuse, their names in heads, and neutral values.
OPTIONS = {
    "attention_dropout": ("dropout", 0),
    "rotary_positions": ("rotary_positions", False),
    "entmax_alpha": ("entmax_alpha", None),
    "routed_key_shift": ("key_shift", 0),
}
# Those that heads as data keep for themselves, where they have them.
OWN_OPTIONS = {
    "exploring_queries": ("exploring_queries", 0),
    "attention_implementation": ("attention_implementation", "plain"),
}


def check_names(h):
    """Raises a `ValueError` if a name stands for no heads."""
    for field in ("routing", "encoder_routing"):
        check_name(field, getattr(h, field))


def check_name(field, name):
    """Raises a `ValueError` if the name in a field stands for no heads."""
    if name not in patterns.OWN:
        check_registered(field, name, (*patterns.OWN, *patterns.all_patterns()))


def check_registered(field, name, names):
    """Raises a `ValueError` if a name is not among all that there are."""
    if name not in names:
        raise ValueError(
            f"`{field}` must be one of {', '.join(map(repr, names))}. Received: "
            f"{field}={name!r}.{did_you_mean(name, filter(None, names))}"
        )


def check_same_name(routed_heads, routing):
    """Raises a `ValueError` if `routed_heads` does not name what `routing` names."""
    check_name("routed_heads", routed_heads)
    if routing not in (None, routed_heads):
        raise ValueError(
            "`routed_heads` and `routing` must not name two patterns. Received: "
            f"routed_heads={routed_heads!r} with routing={routing!r}. Leave one of "
            "the two out"
        )


def check_patterns(h):
    """Raises a `ValueError` if a pattern cannot be used in this model."""
    if h.routed_heads is not None:
        _check_routed_heads(h)
    elif patterns.find(h.routing) is not None:
        _check_named_decoder(h)
        _check_named_heads(h, "routing", h.num_layers)
    if h.encoder_routing is None:
        return
    received = f"Received: encoder_routing={h.encoder_routing!r}"
    if not h.num_encoder_layers:
        raise ValueError(
            f"`encoder_routing` is for models with an encoder, of text. {received} "
            "with num_encoder_layers=0. Leave it out"
        )
    if not patterns.is_of_encoders(h.encoder_routing):
        raise ValueError(
            "`encoder_routing` must name heads that need neither a causal mask nor an "
            f"image, because an encoder has neither. {received}. Choose another, such "
            "as 'expert_choice', 'full' or 'linformer'"
        )
    _check_named_heads(h, "encoder_routing", h.num_encoder_layers)


def _check_routed_heads(h):
    """Refuses head groups that are not those of a decoder with these settings."""
    names = [config["class_name"] for config in h.routed_heads]
    received = f"Received: routed_heads of {', '.join(names)}"
    _check_has_routed_heads(h, "routed_heads", received, h.num_layers)
    if h.routing is not None and not h.num_encoder_layers:
        raise ValueError(
            "`routing` must be None with `routed_heads`, which take the place of its "
            f"heads. {received} with routing={h.routing!r}. Pass `routing=None`, or "
            "`routed_heads=None`"
        )
    for config in h.routed_heads:
        _check_config(h, config, received)
    _check_number_of_heads(h, received)
    _check_own_settings(h, received)


def _check_config(h, config, received):
    """Refuses a head group with flaws, not for decoders, or of another scope."""
    if patterns.class_of(config).has_flaws:
        raise ValueError(
            "`routed_heads` must be heads without flaws of the release. Received: "
            f"routed_heads of {config['registered_name']}. Leave them out, and pass "
            "`compatibility='trained'` or another level"
        )
    pattern = patterns.of_heads(patterns.class_of(config))
    if pattern is not None:
        _check_decoder_pattern(h, pattern, "routed_heads", received)
    scope = config["config"].get("routing_scope", "full")
    competes = config["config"].get("routing") == "expert_choice"
    if competes and scope != h.routing_scope:
        raise ValueError(
            "`routing_scope` must be that of `routed_heads` with expert choice. "
            f"{received} with routing_scope={scope!r}, and routing_scope="
            f"{h.routing_scope!r} beside them. Pass `routing_scope="
            f"{h.routing_scope!r}` to the heads, or `routing_scope={scope!r}` beside "
            "them"
        )


def _check_number_of_heads(h, received):
    numbers = [config["config"].get("num_heads") for config in h.routed_heads]
    if None in numbers:
        raise ValueError(
            "`routed_heads` must have `num_heads` in their configs. "
            f"{received} with num_heads={numbers}. Return it from `get_config`"
        )
    number = sum(check_positive_integer("num_heads", each) for each in numbers)
    if number != h.num_routed_heads:
        heads = "1 head" if number == 1 else f"{number} heads"
        raise ValueError(
            "`num_routed_heads` must be the number of all heads in `routed_heads`. "
            f"{received} with {heads} and num_routed_heads="
            f"{h.num_routed_heads}. Pass `num_routed_heads={number}`"
        )


def _check_own_settings(h, received):
    """Refuses settings that differ from those that the heads keep."""
    settings = [config["config"] for config in h.routed_heads]
    for own, (argument, neutral) in (OPTIONS | OWN_OPTIONS).items():
        value = getattr(h, own)
        there = [each.get(argument, neutral) for each in settings]
        if own in OWN_OPTIONS:
            there = [each[argument] for each in settings if argument in each]
        if value != neutral and any(other != value for other in there):
            raise ValueError(
                f"`{own}` must be {neutral!r} or that of `routed_heads`, which keep "
                f"their own settings. {received} with {argument}={there} and "
                f"{own}={value!r}. Pass `{argument}={value!r}` to the heads, or "
                f"`{own}={neutral!r}`"
            )


def _check_decoder_pattern(h, pattern, field, received):
    if not pattern.of_decoders:
        way_out = "name them in `encoder_routing` of a model with `num_encoder_layers`"
        if field == "routed_heads":
            way_out = "let `encoder_routing` name a pattern of the heads of an encoder"
        raise ValueError(
            f"`{field}` must be heads for decoders. {received}, which have no causal "
            f"form. Choose others, or {way_out}"
        )
    if pattern.of_images and h.kind != "image":
        raise ValueError(
            f"`{field}` must be heads for sequences in a model of text. {received}, "
            "which needs rows and columns. Choose others, or make a model of images, "
            "which has an `image_height` and no encoder"
        )


def _check_named_decoder(h):
    pattern, received = patterns.find(h.routing), f"Received: routing={h.routing!r}"
    _check_decoder_pattern(h, pattern, "routing", received)
    if pattern.shares_query_key and not h.share_query_key:
        raise ValueError(
            f"`share_query_key` must be True with `routing={h.routing!r}`, whose "
            f"queries are its keys. {received} with share_query_key=False. Leave one "
            "of the two out"
        )


def _check_has_routed_heads(h, field, received, num_layers):
    """Refuses a pattern without routed heads, and with flaws of the release."""
    if h.compatibility is not None:
        raise ValueError(
            f"`{field}` must come without `compatibility`, because the release has no "
            f"such models. {received} with compatibility={h.compatibility!r}. Leave "
            "one of the two out"
        )
    if not h.num_routed_heads or h.num_local_only_layers >= num_layers:
        raise ValueError(
            f"`{field}` needs routed heads, and there are none. {received} with "
            f"num_routed_heads={h.num_routed_heads}, "
            f"num_local_only_layers={h.num_local_only_layers} of {num_layers} layers. "
            f"Give some, or leave `{field}` out"
        )


def refuse_option(h, name, error):
    """Raises a `ValueError` that names the hyperparameter which heads refuse.

    Does nothing if the error of the heads that `name` stands for is about none.
    """
    for own, (argument, neutral) in OPTIONS.items():
        value = getattr(h, own)
        if value != neutral and f"`{argument}`" in str(error):
            raise ValueError(
                f"`{own}` must be {neutral} with the heads of {name!r}. Received: "
                f"{own}={value!r}. Leave one of the two out. The heads say: {error}"
            ) from error


def _check_named_heads(h, field, num_layers):
    """Refuses a pattern without routed heads, and settings that they do not take."""
    name = getattr(h, field)
    received = f"Received: {field}={name!r}"
    _check_has_routed_heads(h, field, received, num_layers)
    pattern = patterns.find(name)
    if pattern is None:
        return
    if h.num_routed_heads < pattern.min_heads:
        raise ValueError(
            f"`num_routed_heads` must be at least {pattern.min_heads} with "
            f"`{field}={name!r}`. {received} with num_routed_heads="
            f"{h.num_routed_heads}. Give more, or choose another pattern"
        )
    for own, (argument, neutral) in OPTIONS.items():
        value = getattr(h, own)
        if value == neutral or argument not in pattern.refuses:
            continue
        if argument == "key_shift" and field != "routing":
            continue  # never in an encoder
        raise ValueError(
            f"`{own}` must be {neutral} with `{field}={name!r}`, whose heads have no "
            f"`{argument}`. {received} with {own}={value!r}. Leave one of the two out"
        )
