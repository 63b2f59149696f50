"""Checks of files from strangers, before they are loaded.

Loading runs no code of a file: Keras sees only configs with classes of this package. It
also needs no more memory than the size of the file justifies. The `safe_mode` of Keras
refuses only lambdas: it makes objects of any class of Keras, with weights of any size.

Attributes:
    PACKAGES: set of the packages, as in `keras.saving.register_keras_serializable`,
        whose registered classes a config may name. To trust your own package, write
        `safe_loading.PACKAGES.add("my_package")`.
    LIMITS: `Limits` of files. Raise one for a file that you trust, such as
        `safe_loading.LIMITS.max_layers = 1000`.
"""

import concurrent.futures
import copy
import math
import pathlib
import sys
import warnings
import zipfile
import zlib

import h5py
import keras
import keras_hub
import numpy as np

from routing_tf.files.limits import LIMITS
from routing_tf.files.limits import nested_values
from routing_tf.files.limits import parse_json
from routing_tf.files.limits import read_json

WEIGHTS = "model.weights.h5"

PACKAGES = {"routing_tf"}

_MODELS = ("config.json", "task.json")
_PREPROCESSORS = ("preprocessor.json", "tokenizer.json")
# Modules of Keras with the classes that configs of heads may name.
_PARTS_OF_HEADS = {
    "keras": keras.dtype_policies,
    "keras.constraints": keras.constraints,
    "keras.dtype_policies": keras.dtype_policies,
    "keras.initializers": keras.initializers,
    "keras.random": keras.random,
    "keras.regularizers": keras.regularizers,
}


def load_keras_file(path):
    """Returns the model in a `.keras` file of any origin, not compiled.

    Args:
        path: path of the file.

    Raises:
        ValueError: if it is damaged, contains other members than Keras writes, names
            classes outside of `PACKAGES`, has weights that are smaller than they claim,
            or a config that needs more weights. Then nothing of it is loaded. Also if
            weights are missing or not finite.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_members(archive.infolist(), path)
            config = parse_json(archive.read("config.json"), path)
            with archive.open(WEIGHTS) as file:
                sizes = check_weights(file, path)
    except (KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"A .keras file must be whole. Received: {str(path)!r}: {error}. Save or "
            "copy the model again"
        ) from error
    if isinstance(config, dict):
        config.pop("compile_config", None)  # nor does Keras look at it below
    _check_model(config, sizes, path)
    model = _load(path)
    _check_finite(model, path)
    return model


def _load(path):
    try:
        with warnings.catch_warnings():
            # An error follows if anything is missing.
            warnings.filterwarnings("ignore", "Skipping nested container")
            return keras.saving.load_model(path, compile=False)
    except ValueError as error:
        # Keras names all objects, each on a line.
        lines = [line for line in str(error).splitlines() if line]
        raise ValueError(
            "A .keras file must hold all weights of its model. Received: "
            f"{str(path)!r}: {' '.join(lines[:2])} Save or copy the model again"
        ) from error


def _check_finite(model, source):
    for weight in model.weights:
        if not np.isfinite(keras.ops.convert_to_numpy(weight)).all():
            raise ValueError(
                f"All weights of a model must be finite. Received: {str(source)!r} "
                f"with others in {weight.path}. Save an earlier checkpoint"
            )


def check_preset(preset, has_weights=True):
    """Checks a preset directory of keras_hub, which may then be loaded.

    keras_hub handles everything else, such as the name of a preset that it downloads.
    Without `has_weights`, the directory contains only a preprocessor. Errors are those
    of `load_keras_file`.
    """
    folder = pathlib.Path(preset)
    if not folder.is_dir():
        return
    files = {path.name: read_json(path) for path in sorted(folder.glob("*.json"))}
    sizes = []
    for path in sorted(folder.glob("*.weights.h5")):
        sizes += check_weights(path, path)
    _check_shards(files.get("model.weights.json"), folder)
    for name in _PREPROCESSORS:
        if name in files:
            _check_config(files[name], (), folder / name)
    for name in _MODELS:
        if name in files and has_weights:
            _check_model(files[name], sizes, folder / name)
        elif name in files:
            _check_config(files[name], (files[name],), folder / name)


def check_hyperparameters(hyperparameters, source):
    """Checks that no number in a dict of hyperparameters is absurdly large.

    Also that its heads are of `PACKAGES`, and hold initializers and such, of Keras too,
    but no other layers.
    """
    _check_heads(hyperparameters.get("routed_heads"), source)
    numbers = {k: v for k, v in hyperparameters.items() if isinstance(v, int)}
    limits = {"_layers": "max_layers", "_flange_blocks": "max_flange_blocks"}
    for name, value in numbers.items():
        limit = next((v for k, v in limits.items() if name.endswith(k)), "max_size")
        LIMITS.check(limit, value, name, source)
    if "local_block_width" in numbers:  # images are padded to whole blocks
        size = numbers["local_block_width"] * numbers.get("local_block_length", 1)
        LIMITS.check("max_block_size", size, "sub-pixels in a block", source)


def _check_heads(configs, source):
    """Checks classes and numbers in the head groups of hyperparameters.

    That they are head groups, the hyperparameters check.
    """
    groups = set(map(id, configs if isinstance(configs, list) else [configs]))
    for value in _dicts_inside(configs):
        is_allowed = _is_of_a_package if id(value) in groups else _is_part_of_heads
        if "class_name" in value and not is_allowed(value):
            _refuse(value, source)
        for name, item in value.items():
            if name != "registered_name":
                _check_setting(name, list(_items_of(item)), source)


def _check_setting(name, items, source):
    """Checks names and numbers in a setting of heads."""
    for text in (item for item in items if isinstance(item, str)):
        if ">" in text:  # Keras would make an object of the class of this name
            _refuse({"registered_name": text}, source)
    sizes = [abs(item) for item in items if isinstance(item, (int, float))]
    limit = "max_flange_blocks" if name == "flange_blocks" else "max_size"
    for size in sizes:
        if not size <= sys.float_info.max:
            raise ValueError(
                f"Numbers of heads must be finite. Received: {name}={size} in "
                f"{str(source)!r}. Save it again with other heads"
            )
        if name != "rotary_wavelength" and not name.endswith("seed"):
            LIMITS.check(limit, size, name, source)
    if name.endswith("block_shape") and len(sizes) > 1:
        LIMITS.check("max_block_size", math.prod(sizes), name, source)


def _items_of(value):
    """Yields a value, or all items of a list and of lists in it."""
    if not isinstance(value, list):
        yield value
        return
    for item in value:
        yield from _items_of(item)


def check_memory(hyperparameters, max_length=None):
    """Checks that heads remember no more tokens than a text has, within a limit.

    These are local and routed heads, and those of `routed_heads`. No weight shows how
    many they remember. `max_length` is the number of tokens of a text; None: no end.
    """
    h = hyperparameters
    local = f"local_block_length={h.local_block_length}"
    local += f", local_dilation={h.local_dilation}" if h.local_dilation > 1 else ""
    received = {local: h.local_reach}
    if h.num_routed_heads or h.num_cluster_strided_heads:
        received[f"attention_window={h.attention_window}"] = h.attention_window
    for group in h.routed_heads or ():
        received |= _remembered_by(group["class_name"], group["config"])
    for what, number in received.items():
        if number > max(LIMITS.max_remembered, max_length or 0):
            text = f"a text of {max_length:,}" if max_length else "one without an end"
            raise ValueError(
                "Heads must not remember more tokens than a text has and than "
                "`routing_tf.files.safe_loading.LIMITS.max_remembered`, "
                f"{LIMITS.max_remembered:,}. Received: {number:,} tokens by "
                f"{what}, for {text}. Build the model with a "
                "smaller one, which has the same weights, or set this limit higher"
            )


def _remembered_by(class_name, config):
    """Returns how many tokens a head group may remember, by the setting that says so.

    Heads of any class are bounded, so each number that may be one of tokens counts.
    """
    found = {}
    for name, value in config.items():
        number = math.prod(_whole_numbers(value))
        if name == "block_shape":  # of `LocalHeads`
            number *= 1 + max(_whole_numbers(config.get("flange_blocks")), default=0)
            number *= math.prod(_whole_numbers(config.get("dilation")))
        is_size = name.endswith(("block_shape", "_window", "_length"))
        if is_size or name.startswith("num_") or name in ("radius", "width"):
            found[f"{name}={value} of {class_name}"] = number
    return found


def _whole_numbers(value):
    return [item for item in _items_of(value) if isinstance(item, int)]


def check_fits(build, num_bytes, source):
    """Checks that a model has no more values than its file has bytes.

    `build`, without arguments, returns the model. It is called in a scope in which
    variables have only shapes and need no memory. If it fails, this raises a
    `ValueError`, too.
    """
    # Keras would keep its records of such variables in the thread.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        values = pool.submit(_count_values, build, source).result()
    if values > num_bytes:
        raise ValueError(
            "A model must not have more values than its file has bytes. Received: "
            f"{str(source)!r}, whose config needs {values:,} values, with {num_bytes:,}"
            " bytes of weights. Build the model from its hyperparameters if you want "
            "it without these weights"
        )


def _count_values(build, source):
    try:
        with keras.StatelessScope(initialize_variables=False):
            return sum(math.prod(weight.shape) for weight in build().weights)
    except ValueError:
        raise
    except Exception as error:  # of any kind, because the file decides what is built
        raise ValueError(
            "A model must be one of this version of routing_tf. Received: "
            f"{str(source)!r}, which cannot be built: {error!r}. Save it again"
        ) from error


def _check_shards(index, folder):
    """Checks that the weights of an index are in its folder."""
    named = index.get("weight_map") if isinstance(index, dict) else None
    names = [v for level in nested_values(named) for v in level if isinstance(v, str)]
    refused = [name for name in names if not _is_plain_name(name)]
    if refused:
        raise ValueError(
            "An index of weights must name files of its own folder. Received: "
            f"{str(folder)!r} with {refused[:3]}. Save the model again"
        )


def _is_plain_name(value):
    return isinstance(value, str) and pathlib.PurePath(value).name == value


def _check_model(config, sizes, source):
    """Checks the config of a model and its size, before Keras sees it."""
    backbone = config
    if isinstance(config, dict) and isinstance(config.get("config"), dict):
        backbone = config["config"].get("backbone", config)
    _check_config(config, (config, backbone), source)
    _check_depth(backbone, len(sizes), source)
    # A language model adds at most its embeddings again.
    check_fits(
        lambda: keras.saving.deserialize_keras_object(copy.deepcopy(backbone)),
        sum(sizes),
        source,
    )


def _check_config(config, models, source):
    """Checks classes and numbers; `models` are the objects that may be models."""
    if not isinstance(config, dict) or "class_name" not in config:
        raise ValueError(
            f"A config must name its class. Received: {str(source)!r} without a "
            "class_name. Save the model again"
        )
    heads = set()
    for value in _dicts_inside(config):
        if id(value) in heads:
            continue  # checked with the hyperparameters
        settings = value.get("hyperparameters")
        if isinstance(settings, dict):
            heads.update(map(id, _dicts_inside(settings.get("routed_heads"))))
        _check_object(value, any(value is model for model in models), source)


def _dicts_inside(value):
    """Yields all dicts inside a value of JSON, outer ones before inner ones."""
    for level in nested_values(value):
        yield from (item for item in level if isinstance(item, dict))


def _refuse(value, source):
    names = ("module", "class_name", "registered_name")
    raise ValueError(
        "A config must name only models, preprocessors, tokenizers and head groups, "
        "each in its place, and in head groups only initializers, regularizers, "
        "constraints and dtype policies. Functions are none of these, and all but "
        f"those of Keras must be registered by the packages {sorted(PACKAGES)}. "
        f"Received: { {name: value.get(name) for name in names} } in {str(source)!r}. "
        "If you trust the file, allow the package of your own classes: "
        '`routing_tf.files.safe_loading.PACKAGES.add("my_package")`'
    )


def _check_object(value, may_be_model, source):
    if "class_name" in value and not _is_allowed(value, may_be_model):
        _refuse(value, source)
    for name, item in value.items():
        if name == "hyperparameters" and isinstance(item, dict):
            check_hyperparameters(item, source)
        elif name.endswith("_length") and isinstance(item, int):
            is_filled = name == "encoder_sequence_length"
            limit = "max_input_length" if is_filled else "max_size"
            LIMITS.check(limit, item, name, source)
        elif name == "config_file" and not _is_plain_name(item):
            raise ValueError(
                "`config_file` must be a name without folders. Received: "
                f"{item!r} in {str(source)!r}. Save the model again"
            )


def _is_of_a_package(value):
    """Returns whether a config names a class of `PACKAGES`."""
    return str(value.get("registered_name")).partition(">")[0] in PACKAGES


def _is_part_of_heads(value):
    """Returns whether Keras would make what heads may hold, such as an initializer."""
    name, class_name = value.get("registered_name"), value["class_name"]
    if name is None:
        module = _PARTS_OF_HEADS.get(str(value.get("module")))
        classes = {} if module is None else vars(module)
        return isinstance(classes.get(str(class_name)), type)
    if not _is_of_a_package(value):
        return False
    cls = keras.saving.get_registered_object(name)
    kinds = (keras.initializers.Initializer, keras.regularizers.Regularizer)
    kinds += (keras.constraints.Constraint, keras.dtype_policies.DTypePolicy)
    is_part = isinstance(cls, type) and issubclass(cls, kinds)
    # Keras acts on some class names, such as __lambda__, whatever is registered.
    return is_part and cls.__name__ == class_name


def _is_allowed(value, may_be_model):
    """Returns whether Keras would make one of our objects or a dtype policy."""
    name, class_name = value.get("registered_name"), value["class_name"]
    if not isinstance(value.get("config"), dict) or not isinstance(class_name, str):
        return False
    if name is None:
        is_policy = class_name in vars(keras.dtype_policies)
        return is_policy and value.get("module") in ("keras", "keras.dtype_policies")
    # Keras acts on some class names, such as __lambda__, whatever is registered.
    package, _, own_name = str(name).partition(">")
    if package not in PACKAGES or own_name != class_name:
        return False
    cls = keras.saving.get_registered_object(name)
    # Separate layers could need any amount of memory.
    kinds = (keras_hub.models.Preprocessor, keras_hub.tokenizers.Tokenizer)
    kinds += (keras.Model,) if may_be_model else ()
    return isinstance(cls, type) and issubclass(cls, kinds)


def _check_depth(backbone, num_arrays, source):
    """Checks the number of blocks, each of which takes time to build."""
    try:
        settings = backbone["config"]["hyperparameters"]
        blocks = settings["num_layers"] + settings.get("num_encoder_layers", 0)
    except (KeyError, TypeError, AttributeError):
        return  # building it reports the error
    if blocks > num_arrays:
        raise ValueError(
            "A model must not have more blocks than its file has arrays. Received: "
            f"{str(source)!r} with {blocks:,} blocks and {num_arrays:,} arrays. Save "
            "the model again"
        )


def check_members(members, source):
    """Checks the members of a `.keras` file, which Keras unpacks."""
    allowed = {"config.json", "metadata.json", WEIGHTS}
    others = [
        member.filename
        for member in members
        if member.filename not in allowed and not member.filename.startswith("assets/")
    ]
    if others:
        raise ValueError(
            "A .keras file must hold what Keras writes: config.json, metadata.json, "
            f"{WEIGHTS} and assets. Received: {str(source)!r} with {others[:3]}. "
            "Save the model again"
        )
    weights = [member for member in members if member.filename == WEIGHTS]
    packed = [m for m in weights if m.compress_type != zipfile.ZIP_STORED]
    stored = sum(member.compress_size for member in members)
    # Members that overlap would be unpacked several times.
    if packed or stored > pathlib.Path(source).stat().st_size:
        raise ValueError(
            "Weights in a .keras file must not be compressed, and no bytes stand for "
            f"two members. Received: {str(source)!r}. Save the model again, which "
            "compresses nothing"
        )
    sizes = {m.filename: m.file_size for m in members if m not in weights}
    LIMITS.check("max_text_bytes", sum(sizes.values()), "bytes unpacked", source)
    for name in ("config.json", "metadata.json"):
        LIMITS.check("max_json_bytes", sizes.get(name, 0), "bytes unpacked", source)


def check_weights(file, source):
    """Returns the actual bytes of each array of an HDF5 file."""
    sizes = []

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            if item.dtype.kind not in "biufV":
                raise ValueError(f"{name} holds no numbers")
            sizes.append(math.prod(item.shape or ()) * item.dtype.itemsize)

    try:
        with h5py.File(file, "r") as weights:
            weights.visititems(add)
            num_bytes = weights.id.get_filesize()
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "Weights must be a whole HDF5 file of numbers. Received: "
            f"{str(source)!r}: {error}. Save or copy the model again"
        ) from error
    if sum(sizes) > num_bytes:
        raise ValueError(
            "Weights must be stored as they are. Received: arrays of "
            f"{sum(sizes):,} bytes in the {num_bytes:,} bytes of {str(source)!r}. Save "
            "the model again, which compresses nothing"
        )
    return sizes
