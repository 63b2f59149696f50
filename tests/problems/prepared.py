"""Problems whose data is prepared from the raw files of a test."""

import hashlib
import io
import tarfile
import zipfile

import tensorflow_datasets as tfds

from routing_tf import problems
from routing_tf.tokenizers import SubwordTokenizer


def get(name, tmp_path, raw=None, **options):
    """A problem, its data prepared if there are raw files."""
    options = {"data_dir": str(tmp_path / "data"), **options}
    if raw is not None:
        list(problems.get(name, **options).generate(str(raw)))
    return problems.get(name, **options)


def rows_of(problem, split):
    """The ids of each held-out window."""
    batches = problem.dataset(split, 1, training=False).as_numpy_iterator()
    return [targets[weights == 1].tolist() for _, targets, weights in batches]


def texts_of(problem, split):
    """The pairs of a split as texts, without their end ids."""
    return [
        tuple(problem.tokenizer.detokenize(ids) for ids in problem.pair(split, n))
        for n in range(problem.num_windows(split))
    ]


def write_zip(path, files, compression=zipfile.ZIP_STORED):
    """Writes contents by their names, as a dict has them."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def write_tar(path, files, mode="w:gz"):
    """Writes contents by their names; None stands for a folder."""
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
            info.size = len(content or b"")
            archive.addfile(info, io.BytesIO(content or b""))


def write_vocabulary(path, texts, size=64):
    """Learns subwords of texts, writes them and returns them."""
    tokens = SubwordTokenizer.build_vocabulary(texts, size)
    SubwordTokenizer(tokens).save_vocabulary(path)
    return tokens


def trust(monkeypatch, builder, raw):
    """Lets tfds take the files of a test for the originals, and download none."""

    def download(self, resource):
        raise ConnectionError(f"no way to {getattr(resource, 'url', resource)}")

    monkeypatch.setattr(tfds.download.DownloadManager, "_download", download)
    infos = {}
    for url, info in builder.url_infos.items():
        path = raw / info.filename
        if path.exists():
            content = path.read_bytes()
            infos[url] = tfds.download.checksums.UrlInfo(
                size=len(content),
                checksum=hashlib.sha256(content).hexdigest(),
                filename=info.filename,
            )
    monkeypatch.setattr(builder, "url_infos", infos)
