"""Checks of files from strangers, before they are loaded.

Loading runs no code of a file: Keras sees only configs whose classes are those of
this package. And it takes no more memory than a file's own size accounts for.

The limits are attributes of this module. Set one where a file that you trust is beyond
it, such as `safe_loading.MAX_LAYERS = 1000`, or `safe_loading.PACKAGES.add("mine")`.

Attributes:
    PACKAGES: set of the packages, as in `keras.saving.register_keras_serializable`,
        whose registered classes a config may name.
    MAX_JSON_BYTES: size of a JSON file, such as a config.
    MAX_JSON_DEPTH: how many lists and objects may lie inside each other in it.
    MAX_TEXT_BYTES: size of a vocabulary file, or of all of a `.keras` file but its
        weights.
    MAX_TOKENS: number of lines of a vocabulary file.
    MAX_TOKEN_LENGTH: number of characters of such a line.
    MAX_SIZE: largest whole number among hyperparameters, and largest length.
    MAX_LAYERS: largest number of blocks of an encoder or a decoder.
    MAX_FLANGE_BLOCKS: largest number of blocks that local heads see behind their own.
    MAX_BLOCK_SIZE: number of sub-pixels of a block of an image.
    MAX_INPUT_LENGTH: number of tokens that an encoder takes, however short a text is.
    MAX_REMEMBERED: number of tokens that heads may remember of a text that has fewer,
        or no end.
"""

import concurrent.futures
import copy
import json
import math
import pathlib
import warnings
import zipfile
import zlib

import h5py
import keras
import keras_hub
import numpy as np

PACKAGES = {"routing_tf"}
MAX_JSON_BYTES = 2**20
MAX_JSON_DEPTH = 32
MAX_TEXT_BYTES = 2**26
MAX_TOKENS = 2**22
MAX_TOKEN_LENGTH = 2**16
MAX_SIZE = 2**24
MAX_LAYERS = 256
MAX_FLANGE_BLOCKS = 256
MAX_BLOCK_SIZE = 2**16
MAX_INPUT_LENGTH = 2**16
MAX_REMEMBERED = 2**16

_WEIGHTS = "model.weights.h5"
_PLAIN = (str, int, float, type(None))
_MODELS = ("config.json", "task.json")
_PREPROCESSORS = ("preprocessor.json", "tokenizer.json")


def read_json(path):
    """Reads a JSON file of limited size and depth.

    Args:
        path: path of the file.

    Returns:
        What it holds.

    Raises:
        ValueError: if it is no JSON, larger than `MAX_JSON_BYTES` or nested deeper
            than `MAX_JSON_DEPTH`.
        OSError: if it cannot be read.
    """
    return _parse_json(_read(path, "MAX_JSON_BYTES"), path)


def read_lines(path):
    r"""Reads the lines of a vocabulary file.

    Args:
        path: path of the file, in UTF-8.

    Returns:
        List of the lines, split at `"\n"` alone.

    Raises:
        ValueError: if the file is larger than `MAX_TEXT_BYTES`, has more lines than
            `MAX_TOKENS` or one that is longer than `MAX_TOKEN_LENGTH`, or is not in
            UTF-8.
        OSError: if it cannot be read.
    """
    # Tokens may hold characters at which str.splitlines would break a line.
    try:
        text = _read(path, "MAX_TEXT_BYTES").decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"A vocabulary must be text in UTF-8. Received: {str(path)!r}: {error}"
        ) from error
    _check_limit("MAX_TOKENS", text.count("\n") + 1, "lines", path)
    lines = text.split("\n") if text else []
    longest = max(map(len, lines), default=0)
    _check_limit("MAX_TOKEN_LENGTH", longest, "characters in a line", path)
    return lines


def load_keras_file(path):
    """Loads a model from a `.keras` file of any origin.

    Args:
        path: path of the file.

    Returns:
        The model, not compiled.

    Raises:
        ValueError: if it is damaged, holds anything but what Keras writes, names
            classes outside of `PACKAGES`, has weights that are smaller than they
            claim, or a config that needs more than them. Nothing of it is loaded then.
            Also if weights are missing or not finite.
        OSError: if it cannot be read.

    Example:

    ```python
    from routing_tf import models
    from routing_tf.files import safe_loading

    models.RoutingImageTransformer.from_preset("digits_small").save("some.keras")
    model = safe_loading.load_keras_file("some.keras")
    ```
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(archive.infolist(), path)
            config = _parse_json(archive.read("config.json"), path)
            with archive.open(_WEIGHTS) as file:
                sizes = _check_weights(file, path)
    except (KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"A .keras file must be whole. Received: {str(path)!r}: {error}. Save or "
            "copy the model anew"
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
            # An error follows, if anything is missing.
            warnings.filterwarnings("ignore", "Skipping nested container")
            return keras.saving.load_model(path, compile=False)
    except ValueError as error:
        # Keras names all objects, on as many lines.
        lines = [line for line in str(error).splitlines() if line]
        raise ValueError(
            "A .keras file must hold all weights of its model. Received: "
            f"{str(path)!r}: {' '.join(lines[:2])} Save or copy the model anew"
        ) from error


def _check_finite(model, source):
    for weight in model.weights:
        if not np.isfinite(keras.ops.convert_to_numpy(weight)).all():
            raise ValueError(
                f"All weights of a model must be finite. Received: {str(source)!r} "
                f"with others in {weight.path}. Save a checkpoint from before they "
                "became so"
            )


def check_preset(preset, has_weights=True):
    """Checks a preset directory of keras_hub, which may then be loaded.

    Args:
        preset: path of the directory. Anything else, such as the name of a preset that
            keras_hub downloads, is left to keras_hub.
        has_weights: whether the model is to be loaded with its weights (the default);
            False for a directory of a preprocessor alone.

    Raises:
        ValueError: as `load_keras_file` does.
        OSError: if a file cannot be read.

    Example:

    ```python
    from routing_tf import models
    from routing_tf.files import safe_loading

    cls = models.RoutingTransformerCausalLM
    cls.from_preset("byte_tiny").save_to_preset("some_preset")
    safe_loading.check_preset("some_preset")  # `from_preset` does this too
    lm = cls.from_preset("some_preset")
    ```
    """
    folder = pathlib.Path(preset)
    if not folder.is_dir():
        return
    files = {path.name: read_json(path) for path in sorted(folder.glob("*.json"))}
    sizes = []
    for path in sorted(folder.glob("*.weights.h5")):
        sizes += _check_weights(path, path)
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
    """Checks that no hyperparameter is absurdly large.

    Args:
        hyperparameters: dict of the fields of `Hyperparameters`.
        source: the file they come from, for the message.

    Raises:
        ValueError: if a whole number is larger than `MAX_SIZE`, a number of layers
            larger than `MAX_LAYERS`, one of blocks larger than `MAX_FLANGE_BLOCKS`, or
            a block of an image larger than `MAX_BLOCK_SIZE`.
    """
    numbers = {k: v for k, v in hyperparameters.items() if isinstance(v, int)}
    limits = {"_layers": "MAX_LAYERS", "_flange_blocks": "MAX_FLANGE_BLOCKS"}
    for name, value in numbers.items():
        limit = next((v for k, v in limits.items() if name.endswith(k)), "MAX_SIZE")
        _check_limit(limit, value, name, source)
    if "local_block_width" in numbers:  # images are filled up to whole blocks
        size = numbers["local_block_width"] * numbers.get("local_block_length", 1)
        _check_limit("MAX_BLOCK_SIZE", size, "sub-pixels in a block", source)


def check_memory(hyperparameters, max_length=None):
    """Checks that heads remember no more tokens than there are, or than is bearable.

    No weight shows how many they remember, and each takes memory from the start.

    Args:
        hyperparameters: `Hyperparameters`.
        max_length: number of tokens that a text may have; None (the default) for no
            end.

    Raises:
        ValueError: if they remember more than that and than `MAX_REMEMBERED`.
    """
    h = hyperparameters
    blocks = h.local_flange_blocks + 1
    remembered = {"local_block_length": blocks * math.prod(h.local_block_shape)}
    if h.num_routed_heads or h.num_cluster_strided_heads:
        remembered["attention_window"] = h.attention_window
    for name, number in remembered.items():
        if number > max(MAX_REMEMBERED, max_length or 0):
            text = f"a text of {max_length:,}" if max_length else "one without an end"
            raise ValueError(
                "Heads must not remember more tokens than a text has and than "
                "`routing_tf.files.safe_loading.MAX_REMEMBERED`, "
                f"{MAX_REMEMBERED:,}. Received: {number:,} tokens by "
                f"{name}={getattr(h, name)}, for {text}. Build the model with a "
                "smaller one, which has the same weights, or set this limit higher"
            )


def check_fits(build, num_bytes, source):
    """Checks that a model has no more values than its file has bytes.

    Args:
        build: function without arguments that returns the model. It is called where
            variables have shapes alone and take no memory.
        num_bytes: number of bytes of the weights in the file.
        source: the file, for the message.

    Raises:
        ValueError: if the model has more values, or cannot be built.

    Example:

    ```python
    import keras
    from routing_tf.files import safe_loading


    def build():
        return keras.Sequential([keras.Input((10**6,)), keras.layers.Dense(10**6)])


    try:
        safe_loading.check_fits(build, num_bytes=1000, source="small.keras")
    except ValueError as error:
        print(error)
    ```
    """
    # What Keras notes about such variables is left behind in the thread.
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
    except Exception as error:  # of any kind: what is built is up to the file
        raise ValueError(
            "A model must be one of this version of routing_tf. Received: "
            f"{str(source)!r}, which cannot be built: {error!r}. Save it anew"
        ) from error


def _read(path, limit):
    size = pathlib.Path(path).stat().st_size
    _check_limit(limit, size, "bytes", path)
    return pathlib.Path(path).read_bytes()


def _check_limit(limit, value, what, source):
    largest = globals()[limit]
    if value > largest:
        raise ValueError(
            f"A file must keep to `routing_tf.files.safe_loading.{limit}`, "
            f"{largest:,}. Received: {value:,} {what} in {str(source)!r}. If you "
            "trust the file, set this limit higher"
        )


def _parse_json(data, source):
    try:
        found = json.loads(data)
    except RecursionError:
        found, depth = None, math.inf
    except ValueError as error:
        raise ValueError(
            f"A JSON file must be whole. Received: {str(source)!r}: {error}. Save or "
            "copy it anew"
        ) from error
    else:
        depth = sum(1 for _ in _values(found)) - 1
    _check_limit("MAX_JSON_DEPTH", depth, "values inside each other", source)
    return found


def _values(value):
    """Yields all values inside a value of JSON, one list for each depth."""
    level = [value]
    while level:
        yield level
        lists = [v.values() if isinstance(v, dict) else v for v in level]
        level = [item for v in lists if not isinstance(v, _PLAIN) for item in v]


def _check_members(members, source):
    """Checks what a `.keras` file says of its members: all that Keras unpacks."""
    allowed = {"config.json", "metadata.json", _WEIGHTS}
    others = [
        member.filename
        for member in members
        if member.filename not in allowed and not member.filename.startswith("assets/")
    ]
    if others:
        raise ValueError(
            "A .keras file must hold what Keras writes: config.json, metadata.json, "
            f"{_WEIGHTS} and assets. Received: {str(source)!r} with {others[:3]}. "
            "Save the model anew"
        )
    weights = [member for member in members if member.filename == _WEIGHTS]
    packed = [m for m in weights if m.compress_type != zipfile.ZIP_STORED]
    stored = sum(member.compress_size for member in members)
    # Members that overlap would be unpacked several times.
    if packed or stored > pathlib.Path(source).stat().st_size:
        raise ValueError(
            "Weights in a .keras file must not be compressed, and no bytes stand for "
            f"two members. Received: {str(source)!r}. Save the model anew, which "
            "compresses nothing"
        )
    sizes = {m.filename: m.file_size for m in members if m not in weights}
    _check_limit("MAX_TEXT_BYTES", sum(sizes.values()), "bytes unpacked", source)
    for name in ("config.json", "metadata.json"):
        _check_limit("MAX_JSON_BYTES", sizes.get(name, 0), "bytes unpacked", source)


def _check_weights(file, source):
    """Returns the bytes of each array of an HDF5 file, which it really has."""
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
            f"{str(source)!r}: {error}. Save or copy the model anew"
        ) from error
    if sum(sizes) > num_bytes:
        raise ValueError(
            "Weights must be stored as they are. Received: arrays of "
            f"{sum(sizes):,} bytes in the {num_bytes:,} bytes of {str(source)!r}. Save "
            "the model anew, which compresses nothing"
        )
    return sizes


def _check_shards(index, folder):
    """Checks that the weights that an index names lie in its folder."""
    named = index.get("weight_map") if isinstance(index, dict) else None
    names = [v for level in _values(named) for v in level if isinstance(v, str)]
    refused = [name for name in names if not _is_plain_name(name)]
    if refused:
        raise ValueError(
            "An index of weights must name files of its own folder. Received: "
            f"{str(folder)!r} with {refused[:3]}. Save the model anew"
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
    # A language model adds no more than its embeddings again.
    check_fits(
        lambda: keras.saving.deserialize_keras_object(copy.deepcopy(backbone)),
        sum(sizes),
        source,
    )


def _check_config(config, models, source):
    """Checks classes and numbers; `models` are those of its objects that may be one."""
    if not isinstance(config, dict) or "class_name" not in config:
        raise ValueError(
            "A config must name the class it is of. Received: "
            f"{str(source)!r} without a class_name. Save the model anew"
        )
    for level in _values(config):
        for value in level:
            if isinstance(value, dict):
                _check_object(value, any(value is model for model in models), source)


def _check_object(value, may_be_model, source):
    if "class_name" in value and not _is_allowed(value, may_be_model):
        names = ("module", "class_name", "registered_name")
        raise ValueError(
            "A config must name only models, preprocessors and tokenizers, each in its "
            f"place, that are registered by the packages {sorted(PACKAGES)}. Received: "
            f"{ {name: value.get(name) for name in names} } in {str(source)!r}. If you "
            "trust the file, add the package of your own classes to "
            "routing_tf.files.safe_loading.PACKAGES"
        )
    for name, item in value.items():
        if name == "hyperparameters" and isinstance(item, dict):
            check_hyperparameters(item, source)
        elif name.endswith("_length") and isinstance(item, int):
            is_filled = name == "encoder_sequence_length"
            limit = "MAX_INPUT_LENGTH" if is_filled else "MAX_SIZE"
            _check_limit(limit, item, name, source)
        elif name == "config_file" and not _is_plain_name(item):
            raise ValueError(
                "`config_file` must be a name without folders. Received: "
                f"{item!r} in {str(source)!r}. Save the model anew"
            )


def _is_allowed(value, may_be_model):
    """Tells whether Keras would make one of our objects, or a dtype policy."""
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
    # Layers on their own could take any memory.
    kinds = (keras_hub.models.Preprocessor, keras_hub.tokenizers.Tokenizer)
    kinds += (keras.Model,) if may_be_model else ()
    return isinstance(cls, type) and issubclass(cls, kinds)


def _check_depth(backbone, num_arrays, source):
    """Checks the number of blocks, each of which takes time to build."""
    try:
        settings = backbone["config"]["hyperparameters"]
        blocks = settings["num_layers"] + settings.get("num_encoder_layers", 0)
    except (KeyError, TypeError, AttributeError):
        return  # building it tells what is wrong
    if blocks > num_arrays:
        raise ValueError(
            "A model must not have more blocks than its file has arrays. Received: "
            f"{str(source)!r} with {blocks:,} blocks and {num_arrays:,} arrays. Save "
            "the model anew"
        )
