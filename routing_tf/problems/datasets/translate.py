"""Problems of translation: the news tasks of WMT, as documents."""

import itertools

from routing_tf.problems.arguments import boolean
from routing_tf.problems.registry import register
from routing_tf.problems.seq2seq import PAIRS_AT_ONCE
from routing_tf.problems.seq2seq import Seq2SeqProblem


class WmtProblem(Seq2SeqProblem):
    """Translation of the news of a year of WMT, as documents.

    Sentences that follow each other in the data are joined by single spaces to one
    document, as many as fit `input_length` and `sequence_length`, end ids included.
    tensorflow-datasets does not tell where the texts of the corpora end: a document may
    run over into the next one. A sentence that does not fit is a document of its own.

    `datagen` takes the files of the corpora by their original names, or downloads
    them. Documents need them in the order of the corpora; data of
    tensorflow-datasets that others have prepared is in another one, and only has
    sentences. tensorflow-datasets holds a split in memory when it writes it in order:
    about half a GB for each million pairs of sentences.

    Args:
        document: boolean, whether sentences are joined. Defaults to True.
        **options: arguments of `Seq2SeqProblem`.

    Attributes:
        languages: pair of strings, the codes of the languages of source and target.
    """

    languages = None

    def __init__(self, document=True, **options):
        super().__init__(**options)
        self.document = boolean("document", document)

    @property
    def storage(self):
        return self.name

    @property
    def variant(self):
        if not self.document:
            return f"{super().variant}-sentences"
        return f"{super().variant}-{self.input_length}-{self.sequence_length}"

    @property
    def options_without_effect(self):
        names = super().options_without_effect
        return names - {"sequence_length", "input_length"} if self.document else names

    def prepare_source(self):
        info = self.tfds_builder.info
        if not self.tfds_builder.is_prepared():
            info.as_proto.disable_shuffling = True
        try:
            super().prepare_source()
        except AssertionError as error:
            # How the builders of WMT say what is wrong with a file.
            raise ValueError(
                f"The raw files of {self.name} must be whole. Received: raw_dir="
                f"{self.raw_dir!r}: {error}"
            ) from error

    def examples(self, split, start):
        if self.document and not self.tfds_builder.info.disable_shuffling:
            raise ValueError(
                "`document` needs sentences in the order of the corpora. Received: "
                f"sentences in {self.tfds_builder.data_dir!r} in the order of "
                "tensorflow-datasets. Remove that folder, use another data_dir, or "
                "pass document=false"
            )
        return super().examples(split, start)

    def num_examples(self, split):
        # Documents are counted when they are made.
        return None if self.document else super().num_examples(split)

    def pair_of(self, example):
        return tuple(example[code].decode("utf-8") for code in self.languages)

    def encoded(self, pairs):
        if not self.document:
            yield from super().encoded(pairs)
            return
        document, lengths = [], (0, 0)
        while batch := list(itertools.islice(pairs, PAIRS_AT_ONCE)):
            for pair, added in zip(batch, zip(*map(self._lengths, zip(*batch)))):
                longer = tuple(map(sum, zip(lengths, added)))
                if document and not self._fits(longer):
                    yield len(document), *self._joined(document)
                    document, longer = [], added
                document, lengths = [*document, pair], longer
        if document:
            yield len(document), *self._joined(document)

    def _lengths(self, texts):
        """How many ids each text adds to a document; of subwords, perhaps fewer."""
        return [len(ids) for ids in self.encode([f" {text}" for text in texts])]

    def _fits(self, lengths):
        # The first sentence has no space in front, but the last one the end id behind.
        limits = (self.input_length, self.sequence_length)
        return all(length <= limit for length, limit in zip(lengths, limits))

    def _joined(self, document):
        return [self.encode([" ".join(texts)])[0] for texts in zip(*document)]


@register("translate_ende_wmt14")
class TranslateEndeWmt14(WmtProblem):
    """English to German: the news of WMT 2014, as documents.

    Takes the arguments of `WmtProblem`. 4.5 million sentences are for training,
    newstest2013 for validation, newstest2014 for testing.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("translate_ende_wmt14", data_dir="data", document=False)
    problem.languages  # ("en", "de")
    ```
    """

    builder = "wmt14_translate/de-en"
    languages = ("en", "de")


@register("translate_deen_wmt14")
class TranslateDeenWmt14(WmtProblem):
    """German to English: the news of WMT 2014, as documents."""

    builder = "wmt14_translate/de-en"
    languages = ("de", "en")


@register("translate_enfr_wmt14")
class TranslateEnfrWmt14(WmtProblem):
    """English to French: the news of WMT 2014, as documents."""

    builder = "wmt14_translate/fr-en"
    languages = ("en", "fr")


@register("translate_fren_wmt14")
class TranslateFrenWmt14(WmtProblem):
    """French to English: the news of WMT 2014, as documents."""

    builder = "wmt14_translate/fr-en"
    languages = ("fr", "en")


@register("translate_enro_wmt16")
class TranslateEnroWmt16(WmtProblem):
    """English to Romanian: the news of WMT 2016, as documents."""

    builder = "wmt16_translate/ro-en"
    languages = ("en", "ro")


@register("translate_roen_wmt16")
class TranslateRoenWmt16(WmtProblem):
    """Romanian to English: the news of WMT 2016, as documents."""

    builder = "wmt16_translate/ro-en"
    languages = ("ro", "en")


@register("translate_enfi_wmt17")
class TranslateEnfiWmt17(WmtProblem):
    """English to Finnish: the news of WMT 2017, as documents."""

    builder = "wmt17_translate/fi-en"
    languages = ("en", "fi")


@register("translate_fien_wmt17")
class TranslateFienWmt17(WmtProblem):
    """Finnish to English: the news of WMT 2017, as documents."""

    builder = "wmt17_translate/fi-en"
    languages = ("fi", "en")
