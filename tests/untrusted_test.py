"""Files of strangers run nothing and take no memory: real attacks, one by one."""

import contextlib
import functools
import json
import pathlib
import shutil
import zipfile
from unittest import mock

import h5py
import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import models
from routing_tf import zoo
from routing_tf.files import safe_loading
from routing_tf.generation import token_stream
from routing_tf.models import presets
from routing_tf.models import stack
from routing_tf.models.release import checkpoints
from routing_tf.models.release import conversion
from routing_tf.problems import array_store
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import SubwordTokenizer
from routing_tf.tokenizers import WordTokenizer
from routing_tf.training import run_folder
from tests import golden_cases
from tests.models.checkpoints_test import write_checkpoint

CLASSES = {
    "byte_tiny": models.RoutingTransformerCausalLM,
    "digits_small": models.RoutingImageTransformer,
}
RELEASE = golden_cases.FOLDER / "checkpoints/enwik8_local_cluster8k/model.ckpt-1234"
MOST_BLOCKS = 32
HPARAMS = golden_cases.load("models/enwik8_local_cluster8k.npz").config["hparams"]


@keras.saving.register_keras_serializable("some_library")
class WithSideEffect(ByteTokenizer):
    """What another library may have registered."""

    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        pathlib.Path(path).touch()


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A sound `.keras` file and a sound preset directory of each model."""
    folder = tmp_path_factory.mktemp("originals")
    for name, cls in CLASSES.items():
        options = {}
        if name == "byte_tiny":
            options["preprocessor"] = models.RoutingTransformerCausalLMPreprocessor(
                ByteTokenizer(), sequence_length=64
            )
        model = cls.from_preset(name, **options)
        model.save(folder / f"{name}.keras")
        model.save_to_preset(str(folder / name))
    return folder


@pytest.fixture(autouse=True)
def marker(tmp_path, monkeypatch):
    """The file that attacks create, if their code runs."""
    path = tmp_path / "attacked"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/evil.py").write_text(
        f"import pathlib; pathlib.Path({str(path)!r}).touch()"
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield path
    assert not path.exists()


def peak_memory():
    """The largest number of bytes that this process had since the last call."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(kilobytes)


@contextlib.contextmanager
def assert_refused(message=None, bytes_taken=2**27, kinds=ValueError):
    """Checks that an attack is refused, with few blocks built and without memory."""
    peak_memory()
    before = peak_memory()
    blocks = mock.patch.object(stack, "decoder_block", wraps=stack.decoder_block)
    with blocks as build, pytest.raises(kinds, match=message):
        yield
    # They are what takes time.
    assert build.call_count <= MOST_BLOCKS
    assert peak_memory() - before < bytes_taken


def rewrite(original, path, change=None, weights=None, compression=zipfile.ZIP_STORED):
    """Copies a `.keras` file with another config, other weights or all packed."""
    with (
        zipfile.ZipFile(original) as old,
        zipfile.ZipFile(path, "w", compression) as new,
    ):
        for info in old.infolist():
            data = old.read(info)
            if info.filename == "config.json" and change is not None:
                data = json.dumps(change(json.loads(data)))
            if info.filename == "model.weights.h5" and weights is not None:
                data = weights
            new.writestr(info.filename, data)
    return path


def entry(module, class_name, config, registered_name=None):
    """A Keras object as configs hold it."""
    return {
        "module": module,
        "class_name": class_name,
        "config": config,
        "registered_name": registered_name,
    }


def attacks(marker):
    """Objects that must never be made, by name."""
    code = keras.layers.Lambda(lambda x: pathlib.Path("attacked").touch()).get_config()
    ours = "routing_tf>RoutingTransformer"
    path = str(marker)
    return {
        "lambda layer": entry("keras.layers", "Lambda", code),
        "lambda": entry(None, "__lambda__", code["function"]["config"], ours),
        "function": entry("builtins", "function", "eval", "eval"),
        "our function": entry("builtins", "function", "eval", ours),
        "download": entry("keras.utils", "function", "get_file"),
        "os.system": entry("os", "system", {"command": f"touch {path}"}),
        "Popen": entry("subprocess", "Popen", {"args": ["touch", path]}),
        "import": entry("evil", "Evil", {}),
        "import of a policy": entry("evil", "DTypePolicy", {}),
        "file": entry("keras.layers", "StringLookup", {"vocabulary": path}),
        "model of Keras": entry("keras", "Sequential", {"name": "x", "layers": []}),
        "SavedModel": entry("keras.layers", "TFSMLayer", {"filepath": path}),
        "other library": entry(
            __name__, "WithSideEffect", {"path": path}, "some_library>WithSideEffect"
        ),
        "unknown name": entry("evil", "Evil", {}, "routing_tf>Evil"),
        "no config": {"class_name": "RoutingTransformer", "registered_name": ours},
    }


def put(config, path, value):
    """Returns the config with another value at a path such as `"a/b"`, or all of it."""
    if path is None:
        return value
    *parents, last = path.split("/")
    place = config
    for key in parents:
        place = place[key]
    place[last] = value
    return config


BACKBONE = "config/backbone/config"
TOKENIZER = "config/preprocessor/config/tokenizer"
PLACES = (
    "config/backbone",
    "config/preprocessor",
    TOKENIZER,
    f"{BACKBONE}/dtype",
    f"{BACKBONE}/hyperparameters/compatibility",
    f"{BACKBONE}/hyperparameters/routed_heads",
    "config/backbone/compile_config",
)


@pytest.fixture
def load_file(originals, tmp_path):
    """Loads a sound `.keras` file with something else in it; see `rewrite`."""

    def load(name, change=None, **options):
        path = tmp_path / "changed.keras"
        rewrite(originals / f"{name}.keras", path, change, **options)
        return safe_loading.load_keras_file(path)

    return load


@pytest.fixture
def load_preset(originals, tmp_path):
    """Loads a sound preset directory with another content of one of its files.

    The content may be a function of the config that is there.
    """

    def load(name, file, content, cls=None):
        folder = tmp_path / "preset"
        shutil.copytree(originals / name, folder, dirs_exist_ok=True)
        if callable(content):
            content = json.dumps(content(json.loads((folder / file).read_text())))
        content = content.encode() if isinstance(content, str) else content
        (folder / file).write_bytes(content)
        return (cls or CLASSES[name]).from_preset(str(folder))

    return load


@pytest.fixture
def trusted(monkeypatch):
    """The user trusts the other library."""
    packages = {*safe_loading.PACKAGES, "some_library"}
    monkeypatch.setattr(safe_loading, "PACKAGES", packages)


def putting(path, value):
    """The change that puts a value at a path."""
    return functools.partial(put, path=path, value=value)


OTHERS = r"`routing_tf\.files\.safe_loading\.PACKAGES\.add"


@pytest.mark.parametrize("name", attacks("x"))
def test_a_file_runs_no_code(name, marker, load_file):
    # Each in all places would take long; one of them is in all of them below.
    for place in (TOKENIZER, None):
        with assert_refused(OTHERS):
            load_file("byte_tiny", putting(place, attacks(marker)[name]))


@pytest.mark.parametrize("place", PLACES)
def test_no_place_in_a_file_runs_code(place, marker, load_file):
    with assert_refused(OTHERS):
        load_file("byte_tiny", putting(place, attacks(marker)["other library"]))


@pytest.mark.parametrize(
    "file, place",
    [
        ("config.json", None),
        ("config.json", "config/dtype"),
        ("task.json", None),
        ("task.json", "config/preprocessor"),
        ("preprocessor.json", None),
        ("preprocessor.json", "config/tokenizer"),
        ("tokenizer.json", None),
        ("tokenizer.json", "config/sequence_length"),
    ],
)
def test_no_place_in_a_preset_runs_code(file, place, marker, load_preset):
    attack = attacks(marker)["other library"]
    with assert_refused(OTHERS):
        load_preset("byte_tiny", file, putting(place, attack))
    if file in ("config.json", "tokenizer.json"):
        with assert_refused(OTHERS):
            backbone = models.RoutingTransformer
            load_preset("byte_tiny", file, putting(place, attack), backbone)


def test_packages_that_the_user_names_are_allowed(load_file, tmp_path, trusted):
    touched = tmp_path / "touched"
    attack = attacks(touched)["other library"]
    model = load_file("byte_tiny", putting(TOKENIZER, attack))
    assert isinstance(model.preprocessor.tokenizer, WithSideEffect)
    assert touched.exists()


def head_config(heads, **settings):
    """The config of a head group with other settings, in a list of it alone."""
    config = keras.saving.serialize_keras_object(heads)
    config["config"].update(settings)
    return [config]


@pytest.mark.parametrize("name", attacks("x"))
def test_configs_of_layers_and_heads_run_no_code(name, marker):
    attack = attacks(marker)[name]
    with assert_refused("`routed_heads`.*Received: routed_heads={"):
        models.Hyperparameters(routed_heads=attack)
    if name == "other library":
        # It is registered: the user's own head groups and initializers are too.
        return
    heads = layers.LocalHeads(4, block_shape=(4,))
    for part, value in (("head_groups", [attack]), ("kernel_initializer", attack)):
        config = layers.MixedAttention([heads], key_dim=4).get_config() | {part: value}
        kinds = (ValueError, TypeError)
        with assert_refused(kinds=kinds):
            layers.MixedAttention.from_config(config)
    config = head_config(heads, embeddings_initializer=attack)
    with assert_refused("`routed_heads`.*LocalHeads"):
        models.RoutingTransformer(models.Hyperparameters(routed_heads=config))


@keras.saving.register_keras_serializable("some_library")
class OwnInitializer(keras.initializers.Ones):
    """An initializer that another library may have registered."""


@pytest.mark.parametrize(
    "part",
    [
        keras.saving.serialize_keras_object(layers.FullHeads(2)),
        keras.saving.serialize_keras_object(ByteTokenizer()),
        keras.saving.serialize_keras_object(OwnInitializer()),
        entry("routing_tf", "RoutingTransformer", {}, "routing_tf>RoutingTransformer"),
        entry("keras.initializers", "get", {}),
        {"class_name": "__lambda__", "config": {"value": ["", None, None]}},
        # Keras takes names of registered classes, too.
        "routing_tf>ByteTokenizer",
        ["some_library>WithSideEffect"],
    ],
    ids=lambda part: part["class_name"] if isinstance(part, dict) else str(part),
)
def test_heads_of_files_hold_no_other_objects(part):
    heads = head_config(layers.FullHeads(2), embeddings_initializer=part)
    for place in (heads, [{**heads[0], "config": {"own": heads}}]):
        with assert_refused(OTHERS):
            safe_loading.check_hyperparameters({"routed_heads": place}, "a file")


def test_a_layer_is_no_initializer():
    with pytest.raises(ValueError, match="`embeddings_initializer`.*ByteTokenizer"):
        layers.FullHeads(2, embeddings_initializer=ByteTokenizer())


@pytest.mark.parametrize(
    "message, settings",
    [
        ("max_size", {"block_shape": [2**25]}),
        ("max_size", {"block_shape": [0, 2**60]}),
        ("max_size", {"block_shape": [-1, -(2**60)]}),
        ("max_block_size", {"block_shape": [2**9, -(2**9)]}),
        ("max_size", {"permutations": [[2**25]]}),
        ("max_size", {"temperature": 1e30}),
        ("max_flange_blocks", {"flange_blocks": [0, 2**10]}),
        ("dropout=nan", {"dropout": float("nan")}),
        ("rotary_wavelength=inf", {"rotary_wavelength": float("inf")}),
        ("rotary_wavelength=1000", {"rotary_wavelength": 10**400}),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
def test_heads_of_files_have_limits(message, settings):
    heads = head_config(layers.LocalHeads(4, (4,)), **settings)
    with pytest.raises(ValueError, match=message):
        safe_loading.check_hyperparameters({"routed_heads": heads}, "a file")


def test_a_run_reads_the_heads_that_it_has_written(tmp_path, trusted):
    seed = keras.random.SeedGenerator(3)
    heads = [
        zoo.GlobalHeads(
            2,
            global_positions=(100, 200, 300, 400),
            rotary_positions=True,
            rotary_wavelength=50_000_000,
            dropout_seed=2**30,
            embeddings_initializer=keras.initializers.GlorotUniform(seed=seed),
        ),
        # It is registered under another name than that of its class.
        zoo.ReformerHeads(2, 4, 8, relative_key_initializer=OwnInitializer()),
    ]
    h = models.Hyperparameters(routed_heads=heads)
    config = run_folder.RunConfig("copy", h)
    config.save(tmp_path)
    assert run_folder.RunConfig.load(tmp_path) == config


def test_a_trained_model_is_loaded_without_its_optimizer(originals, tmp_path):
    model = safe_loading.load_keras_file(originals / "digits_small.keras")
    model.compile("adam", "mse")
    model.save(tmp_path / "compiled.keras")
    copy = safe_loading.load_keras_file(tmp_path / "compiled.keras")
    assert not hasattr(copy, "optimizer")
    for one, other in zip(model.weights, copy.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_formulas_in_vocabularies_are_text(marker, tmp_path):
    formula = f"__import__('os').system('touch {marker}')"
    path = tmp_path / "vocabulary"
    path.write_text(f"'<pad>_'\n'<EOS>_'\n{formula}\n")
    with assert_refused("`vocabulary`.* 3 .*/vocabulary'"):
        SubwordTokenizer(path)
    path.write_text(f"'<pad>_'\n'<EOS>_'\n'{formula}'\n")
    with assert_refused(r"`vocabulary`.*Received .*\[' ', "):
        SubwordTokenizer(path)
    path.write_text(f"<pad>\n<EOS>\n{formula.replace(' ', '')}\n")
    assert WordTokenizer(path).vocabulary_size() == 3


class Touch:
    """What pickle makes of an object when it loads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_arrays_on_disk_are_never_pickled(marker, tmp_path):
    objects = np.array([Touch(marker)], dtype=object)
    np.save(tmp_path / "ids.npy", objects, allow_pickle=True)
    for length in (0, 1):
        info = {"lengths": {"ids": length}, "identity": {}}
        (tmp_path / "info.json").write_text(json.dumps(info))
        with assert_refused(r" dtype.*routing_tf\.datagen"):
            array_store.read(tmp_path)


@pytest.mark.parametrize("length", [0, 10**12])
def test_arrays_on_disk_hold_what_they_claim(length, tmp_path):
    header = {"descr": "<i8", "fortran_order": False, "shape": (10**12,)}
    with open(tmp_path / "ids.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    info = {"lengths": {"ids": length}, "identity": {}}
    (tmp_path / "info.json").write_text(json.dumps(info))
    with assert_refused(r" mmap .*routing_tf\.datagen"):
        array_store.read(tmp_path)


HOSTILE = {
    "byte_tiny": [
        {"hidden_dim": 2**22, "key_dim": 8},
        {"hidden_dim": 10**9, "key_dim": 8},
        {"vocabulary_size": 2**24},
        {"vocabulary_size": 10**12},
        {"intermediate_dim": 2**21},
        {"num_local_heads": 2**20, "key_dim": 16},
        {"num_clusters": 2**23},
        {"max_relative_position": 2**23},
        {"num_layers": 10**9},
        {"num_layers": 256},
        {"max_sequence_length": 10**12},
        {"routing": "random", "num_clusters": 10**12},
        {"embedding_dim": 10**400},
        {"num_layers": 2.5},
        {"local_flange_blocks": 2**16},
        {"no_such_setting": 1},
    ],
    "digits_small": [
        {"image_height": 2**20, "image_width": 2**20, "max_sequence_length": 2**40},
        {"image_height": 2**21, "image_width": 1, "max_sequence_length": 2**21},
        {"image_height": 10**9},
        {"num_classes": 2**22},
        {"num_channels": 2**16, "max_sequence_length": 2**22},
        {"local_block_length": 2**12, "local_block_width": 2**12},
    ],
}
LARGE = r"/(changed\.keras|config\.json|task\.json)'|num_layers=2\.5|no_such_setting"


@pytest.mark.parametrize(
    "name, changes", [(name, each) for name in HOSTILE for each in HOSTILE[name]]
)
def test_a_config_needs_what_its_file_has(name, changes, load_file, load_preset):
    def change(config):
        is_task = "backbone" in config["config"]
        place = config["config"]["backbone"] if is_task else config
        place["config"]["hyperparameters"].update(changes)
        return config

    with assert_refused(LARGE):
        load_file(name, change)
    for file in ("config.json", "task.json") if name == "byte_tiny" else ():
        with assert_refused(LARGE):
            load_preset(name, file, change)


@pytest.mark.parametrize("layer", ["backbone", "embedding"])
def test_nothing_else_takes_memory(layer, originals, load_file, load_preset):
    """Keras builds what a config says is built."""
    with zipfile.ZipFile(originals / "byte_tiny.keras") as file:
        config = json.loads(file.read("config.json"))
    attack = config["config"]["backbone"]
    attack["config"]["hyperparameters"]["intermediate_dim"] = 2**21
    if layer == "embedding":
        settings = {"vocabulary_size": 2**24, "embedding_dim": 16}
        name = "TokenEmbedding"
        attack = entry("routing_tf.layers", name, settings, f"routing_tf>{name}")
        attack["build_config"] = {"input_shape": [None, None]}
    for place in PLACES[1:3]:
        with assert_refused(OTHERS):
            load_file("byte_tiny", putting(place, attack))
    for file in ("tokenizer.json", "preprocessor.json"):
        with assert_refused(OTHERS):
            load_preset("byte_tiny", file, json.dumps(attack))


def test_lengths_of_texts_are_bounded(load_file):
    place = "config/preprocessor/config/sequence_length"
    with assert_refused("max_size.*1,000,000,000,000 sequence_length"):
        load_file("byte_tiny", putting(place, 10**12))


def test_lengths_of_inputs_are_bounded(tmp_path):
    settings = {"num_encoder_layers": 1, "max_input_length": 8}
    backbone = models.RoutingTransformerEncoderDecoder(
        presets.preset_hyperparameters("byte_tiny").replace(**settings)
    )
    preprocessor = models.RoutingTransformerSeq2SeqLMPreprocessor(
        ByteTokenizer(), encoder_sequence_length=2**17, decoder_sequence_length=8
    )
    lm = models.RoutingTransformerSeq2SeqLM(backbone, preprocessor)
    lm.save(tmp_path / "long.keras")
    with assert_refused("max_input_length.*131,072 encoder_sequence_length"):
        safe_loading.load_keras_file(tmp_path / "long.keras")


LONG_MEMORY = [
    ({"attention_window": 2**24}, "16,777,216 .*attention_window=16777216"),
    ({"local_block_length": 2**24}, "33,554,432 .*local_block_length=16777216"),
    ({"local_dilation": 2**20}, "33,554,432 .*16, local_dilation=1048576"),
]


@pytest.mark.parametrize("changes, received", LONG_MEMORY)
def test_caches_are_bounded(changes, received):
    h = presets.preset_hyperparameters("byte_tiny").replace(**changes)
    for length, text in ((None, ""), (20, r" 20\.")):
        with assert_refused(f"max_remembered.*{received}, .*{text}"):
            token_stream.cache_length(h, length)
    with assert_refused(f"max_remembered.*{received}"):
        models.RoutingTransformer(h).make_cache(1, 20)
    # As much as was asked for.
    safe_loading.check_memory(h, 2**25)


@pytest.mark.parametrize(
    "heads, received",
    [
        (layers.RoutedHeads(2, 3, 2**20), "attention_window=1048576 .*RoutedHeads"),
        (layers.LocalHeads(2, (2**19,)), "block_shape=.524288. .*LocalHeads"),
        (layers.LocalHeads(2, (4,), dilation=2**17), "block_shape=.4. .*LocalHeads"),
        (layers.SlidingHeads(2, 2**20), "radius=1048576 .*SlidingHeads"),
        (
            zoo.FeatureMapHeads(2, num_features=2**20),
            "num_features=1048576 .*FeatureMapHeads",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_caches_of_heads_are_bounded(heads, received):
    h = presets.preset_hyperparameters("byte_tiny")
    h = h.replace(routed_heads=heads, routed_key_shift=0)
    with assert_refused(f"1,048,576 .*{received}"):
        safe_loading.check_memory(h, 20)
    safe_loading.check_memory(h, 2**20)


def test_caches_of_images_are_bounded():
    h = presets.preset_hyperparameters("digits_small").replace(attention_window=2**24)
    with assert_refused(r"max_remembered.* 64\."):
        models.RoutingImageTransformer(h).make_cache(1)


def test_what_has_no_window_is_not_bounded():
    h = presets.preset_hyperparameters("byte_tiny").replace(attention_window=2**24)
    safe_loading.check_memory(h.replace(num_local_heads=4, num_routed_heads=0))


def test_nothing_of_a_refused_model_is_left_behind():
    def build():
        return keras.Sequential([keras.Input((2**20,)), keras.layers.Dense(2**20)])

    with assert_refused("1,099,512,676,352 .* 100 "):
        safe_loading.check_fits(build, 100, "a file")
    # On leaving, Keras gives values to all variables that have none.
    with keras.StatelessScope():
        keras.layers.Dense(2).build((None, 2))


def test_limits_can_be_raised(originals, monkeypatch):
    for limit in ("max_layers", "max_size", "max_json_bytes", "max_json_depth"):
        monkeypatch.setattr(safe_loading.LIMITS, limit, 1)
        name = f"routing_tf.files.safe_loading.LIMITS.{limit}"
        with assert_refused(f"`{name}`, 1"):
            safe_loading.load_keras_file(originals / "digits_small.keras")
        monkeypatch.undo()
    safe_loading.load_keras_file(originals / "digits_small.keras")


@pytest.mark.parametrize(
    "message, options",
    [
        ("1,073,741,824 ", {"shape": (2**28,), "chunks": (2**10,)}),
        ("73,786,976,294,838,206,464 ", {"shape": (2**32, 2**32), "chunks": (1, 1)}),
        (
            "8,388,608 ",
            {"data": np.zeros(2**20), "chunks": (2**20,), "compression": "gzip"},
        ),
        ("': x ", {"shape": (3,), "dtype": h5py.string_dtype()}),
    ],
)
def test_weights_are_stored_in_full(message, options, load_file, load_preset, tmp_path):
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        file.create_dataset("x", **options)
    weights = (tmp_path / "weights.h5").read_bytes()
    with assert_refused(message):
        load_file("digits_small", weights=weights)
    with assert_refused(message):
        load_preset("digits_small", "model.weights.h5", weights)


def test_weights_of_other_files_are_refused(originals, load_file, tmp_path):
    secret, path = tmp_path / "secret.h5", tmp_path / "link.h5"
    with zipfile.ZipFile(originals / "digits_small.keras") as file:
        secret.write_bytes(file.read("model.weights.h5"))
    with h5py.File(secret) as there, h5py.File(path, "w") as here:
        for number in range(9):
            data = np.zeros(there.id.get_filesize() // 8)
            here.create_dataset(f"ballast_{number}", data=data)
        for name in there:
            here[name] = h5py.ExternalLink(str(secret), f"/{name}")
    with assert_refused("ExternalLink"):
        load_file("digits_small", weights=path.read_bytes())


IN_ONE_LINE = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize(
    "value", [np.nan, np.inf, pytest.param(None, marks=IN_ONE_LINE)]
)
def test_weights_are_there_and_finite(value, originals, load_file, tmp_path):
    path, name = tmp_path / "weights.h5", "layers/dense/vars/1"
    with zipfile.ZipFile(originals / "digits_small.keras") as file:
        path.write_bytes(file.read("model.weights.h5"))
    with h5py.File(path, "r+") as file:
        if value is None:
            del file[name]
        else:
            file[name][0] = value
    message = r"/changed\.keras' .*logits/bias"
    if value is None:
        message = r"/changed\.keras'.*'logits' .* 2 "
    with assert_refused(message):
        load_file("digits_small", weights=path.read_bytes())


def test_packed_weights_are_refused(load_file):
    with assert_refused(r"Received: '[^']*/changed\.keras'\. "):
        load_file("digits_small", compression=zipfile.ZIP_DEFLATED)


def test_members_that_share_bytes_are_refused(originals, tmp_path):
    path = tmp_path / "shared.keras"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model.weights.h5", bytes(2**20))
        weights = file.getinfo("model.weights.h5")
        for number in range(3):
            copy = zipfile.ZipInfo(f"assets/{number}")
            for name in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(copy, name, getattr(weights, name))
            file.filelist.append(copy)
            file.NameToInfo[copy.filename] = copy
    with assert_refused(r"Received: '[^']*/shared\.keras'\. "):
        safe_loading.load_keras_file(path)


@pytest.mark.parametrize(
    "message, name, size",
    [
        ("max_text_bytes", "assets/vocabulary.words", 2**27),
        ("max_json_bytes", "metadata.json", 2**21),
        ("max_json_bytes", "config.json", 2**21),
        (r"\['model\.weights\.npz'\]", "model.weights.npz", 1),
        (r"\['\.\./\.\./evil\.py'\]", "../../evil.py", 1),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_of_absurd_size_or_name(message, name, size, originals, tmp_path):
    path = tmp_path / "bomb.keras"
    shutil.copy(originals / "digits_small.keras", path)
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file,
        file.open(name, "w") as member,
    ):
        for _ in range(0, size, 2**20):
            member.write(bytes(min(size, 2**20)))
    assert path.stat().st_size < 2**23
    with assert_refused(message):
        safe_loading.load_keras_file(path)


def test_damaged_files(originals, tmp_path):
    whole = (originals / "digits_small.keras").read_bytes()
    place = whole.index(b"routing_tf")
    flipped = whole[:place] + b"R" + whole[place + 1 :]
    path = tmp_path / "damaged.keras"
    for content in (b"", b"PK", b"PK\5\6" + bytes(18), bytes(999), flipped):
        path.write_bytes(content)
        with assert_refused(r"Received: '[^']*/damaged\.keras': "):
            safe_loading.load_keras_file(path)


NESTED = ["[" * 40 + "]" * 40, "[" * 10**5, '{"a":' * 10**5]
INDEX = "model.weights.json"
SHARDS = '{"weight_map": {"/layers": ["model_00000.weights.h5", "%s"]}}'
ELSEWHERE = putting("config/config_file", "/etc/x.json")


@pytest.mark.parametrize(
    "message, name, file, content",
    [
        *(("max_json_depth", "digits_small", "config.json", text) for text in NESTED),
        # Other loaders of keras_hub are not reached.
        ("class_name", "digits_small", "config.json", '{"model_type": "b"}'),
        (r"\['/etc/passwd'\]", "digits_small", INDEX, SHARDS % "/etc/passwd"),
        (r"\['\.\./weights\.h5'\]", "digits_small", INDEX, SHARDS % "../weights.h5"),
        ("`config_file`.*'/etc/x.json'", "byte_tiny", "tokenizer.json", ELSEWHERE),
    ],
)
def test_other_files_of_a_preset(message, name, file, content, load_preset, tmp_path):
    with assert_refused(message):
        load_preset(name, file, content)
    if content in NESTED:
        with assert_refused("`hparams`.*max_json_depth"):
            conversion.read_hparams(tmp_path / "preset/config.json")


def test_large_json_is_not_read(originals, tmp_path):
    shutil.copytree(originals / "digits_small", tmp_path / "preset")
    with open(tmp_path / "preset/metadata.json", "wb") as file:
        file.truncate(2**40)
    with assert_refused("max_json_bytes"):
        models.RoutingImageTransformer.from_preset(str(tmp_path / "preset"))


@pytest.mark.parametrize("cls", [SubwordTokenizer, WordTokenizer])
def test_vocabularies_of_absurd_size_are_not_read(cls, tmp_path):
    path = tmp_path / "vocabulary"
    with open(path, "wb") as file:
        file.truncate(2**40)
    with assert_refused("max_text_bytes.*1,099,511,627,776 "):
        cls(path)
    path.write_bytes(b"\n" * 2**23)
    with assert_refused("max_tokens.*8,388,608 "):
        cls(path)
    path.write_bytes(b"'<pad>_'\n" + b"x" * 2**17)
    with assert_refused("max_token_length.*131,072 "):
        cls(path)


@pytest.fixture
def copied(tmp_path):
    """A copy of a checkpoint of the release, and the file of its data."""
    for file in RELEASE.parent.glob(f"{RELEASE.name}.*"):
        shutil.copy(file, tmp_path)
    return tmp_path / RELEASE.name, next(tmp_path.glob("*.data-*"))


def test_a_checkpoint_holds_what_its_index_claims(copied):
    path, data = copied
    data.write_bytes(data.read_bytes()[:1000])
    with assert_refused("model.ckpt-1234' .*128,784 .* 1,000 "):
        checkpoints.ReleaseCheckpoint(path)


def test_damaged_data_of_a_checkpoint_are_refused(copied):
    path, data = copied
    data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
    checkpoint = checkpoints.ReleaseCheckpoint(path)
    with assert_refused("Received: sparse_transformer/.*model.ckpt-1234'"):
        checkpoint.value(next(iter(checkpoint.shapes)))


@pytest.mark.parametrize(
    "message, name, shape",
    [
        ("max_layers.*1,000,000,000 decoder_layers", "decoder_layer_999999999/x", (1,)),
        ("/model.ckpt' .* 1,000,000,000 ", "decoder_layer_0/projection", (1, 10**9, 0)),
    ],
)
def test_names_and_shapes_of_checkpoints(message, name, shape, tmp_path):
    arrays = {f"sparse_transformer/body/{name}": np.zeros(shape)}
    path = write_checkpoint(tmp_path / "model.ckpt", arrays)
    with assert_refused(message):
        checkpoints.ReleaseCheckpoint(path)


from_release = models.RoutingTransformerCausalLM.from_release_checkpoint


@pytest.mark.parametrize(
    "changes",
    [
        {"query_shape": [10**12], "memory_flange": [10**12]},
        {"max_target_length": 10**12, "max_length": 10**12},
        {"sparsity_cluster_attention_window": 10**12},
    ],
    ids=str,
)
def test_settings_of_a_checkpoint_are_bounded(changes):
    with assert_refused("max_size"):
        from_release(RELEASE, hparams={**HPARAMS, **changes})


def test_settings_of_a_checkpoint_make_no_larger_model(monkeypatch):
    large = models.preset_hyperparameters("pg19_rt_base")
    monkeypatch.setattr(checkpoints, "hyperparameters_of", lambda *_: large)
    with assert_refused("/model.ckpt-1234', .* 128,784 "):
        from_release(RELEASE, hparams=HPARAMS)
