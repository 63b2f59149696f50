"""Pairs of texts: the news tasks of WMT, and abstracts of scientific papers."""

import itertools

from routing_tf.problems.arguments import boolean
from routing_tf.problems.registry import register
from routing_tf.problems.seq2seq import PAIRS_AT_ONCE
from routing_tf.problems.seq2seq import Seq2SeqProblem
from routing_tf.problems.sources import TfdsSource


class WmtProblem(Seq2SeqProblem):
    """Translation of the news of a year of WMT, as documents.

    `translate_ende_wmt14` and similar problems are classes of this one, for English
    (`en`) to or from German (`de`) and French (`fr`) of 2014, Romanian (`ro`) of 2016
    and Finnish (`fi`) of 2017. WMT 2014 has 4.5 million sentences of German for
    training, newstest2013 for validation and newstest2014 for testing.

    Consecutive sentences of the data are joined by single spaces into one document, as
    many as fit into `input_length` and `sequence_length`, including end ids.
    tensorflow-datasets does not show where the texts of the corpora end, so a document
    may continue in the next text. A sentence that does not fit is a separate document.

    `datagen` takes the files of the corpora by their original names, or downloads them.
    Documents need the order of the corpora; data of tensorflow-datasets that others
    have prepared has another order, and only serves for sentences. tensorflow-datasets
    holds a split in memory when it writes it in order: about half a GB for each million
    pairs of sentences.

    Args:
        document: boolean, whether sentences are joined. Defaults to True.
        **options: arguments of `Seq2SeqProblem`.

    Attributes:
        languages: pair of strings, the codes of the languages of source and target.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("translate_ende_wmt14", data_dir="data", document=False)
    problem.languages  # ("en", "de")
    ```
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

    def make_source(self, raw_dir):
        return _Corpora([self.builder], self.data_path, raw_dir, in_order=self.document)

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
        """The number of ids that each text adds to a document, or an upper bound."""
        texts = [f" {text}" for text in texts]
        return [len(ids) for ids in self.tokenizer.encode_batch(texts)]

    def _fits(self, lengths):
        # The first sentence has no space before it, but the last one the end id after
        # it.
        limits = (self.input_length, self.sequence_length)
        return all(length <= limit for length, limit in zip(lengths, limits))

    def _joined(self, document):
        return [self.tokenizer.encode(" ".join(texts)) for texts in zip(*document)]


class _Corpora(TfdsSource):
    """The sentences of WMT, which are written in the order of the corpora."""

    def __init__(self, *arguments, in_order):
        super().__init__(*arguments)
        self.in_order = in_order

    def prepare(self):
        if not self.builder.is_prepared():
            self.builder.info.as_proto.disable_shuffling = True
        try:
            super().prepare()
        except AssertionError as error:
            # How the builders of WMT report a wrong file.
            raise ValueError(
                f"The raw files of {self.names[0]} must be complete. Received: "
                f"raw_dir={self.raw_dir!r}: {error}"
            ) from error

    def examples(self, split, start):
        if self.in_order and not self.builder.info.disable_shuffling:
            raise ValueError(
                "`document` needs sentences in the order of the corpora. Received: "
                f"sentences in {self.builder.data_dir!r} in the order of "
                "tensorflow-datasets. Remove that folder, use another data_dir, or "
                "pass document=false"
            )
        return super().examples(split, start)

    def num_examples(self, split):
        # Documents are counted when they are made.
        return None if self.in_order else super().num_examples(split)


@register("translate_deen_wmt14")
class TranslateDeenWmt14(WmtProblem):
    """German to English: the news of WMT 2014, as documents."""

    builder = "wmt14_translate/de-en"
    languages = ("de", "en")


@register("translate_ende_wmt14")
class TranslateEndeWmt14(WmtProblem):
    """English to German: the news of WMT 2014, as documents."""

    builder = "wmt14_translate/de-en"
    languages = ("en", "de")


@register("translate_fren_wmt14")
class TranslateFrenWmt14(WmtProblem):
    """French to English: the news of WMT 2014, as documents."""

    builder = "wmt14_translate/fr-en"
    languages = ("fr", "en")


@register("translate_enfr_wmt14")
class TranslateEnfrWmt14(WmtProblem):
    """English to French: the news of WMT 2014, as documents."""

    builder = "wmt14_translate/fr-en"
    languages = ("en", "fr")


@register("translate_roen_wmt16")
class TranslateRoenWmt16(WmtProblem):
    """Romanian to English: the news of WMT 2016, as documents."""

    builder = "wmt16_translate/ro-en"
    languages = ("ro", "en")


@register("translate_enro_wmt16")
class TranslateEnroWmt16(WmtProblem):
    """English to Romanian: the news of WMT 2016, as documents."""

    builder = "wmt16_translate/ro-en"
    languages = ("en", "ro")


@register("translate_fien_wmt17")
class TranslateFienWmt17(WmtProblem):
    """Finnish to English: the news of WMT 2017, as documents."""

    builder = "wmt17_translate/fi-en"
    languages = ("fi", "en")


@register("translate_enfi_wmt17")
class TranslateEnfiWmt17(WmtProblem):
    """English to Finnish: the news of WMT 2017, as documents."""

    builder = "wmt17_translate/fi-en"
    languages = ("en", "fi")


@register("arxiv")
class Arxiv(Seq2SeqProblem):
    """Abstracts of papers on arXiv, generated from the articles, as subwords.

    White space of any kind, including line ends, becomes one space.

    Args:
        **options: arguments of `Seq2SeqProblem`. `input_length` defaults to 24064,
            `sequence_length` to 512.

    Reference: Cohan et al., "A Discourse-Aware Attention Model for Abstractive
    Summarization of Long Documents" (2018).
    """

    storage = "arxiv"
    builder = "scientific_papers/arxiv"
    default_input_length = 24064
    default_hparams_set = "arxiv_local_cluster24k"

    def pair_of(self, example):
        # A vocabulary has no line ends; each would need five subwords.
        texts = (example[name].decode("utf-8") for name in ("article", "abstract"))
        return tuple(" ".join(text.split()) for text in texts)


@register("pubmed")
class Pubmed(Arxiv):
    """Abstracts of papers on PubMed, generated from the articles, as subwords.

    The same as `Arxiv` for other papers; `input_length` defaults to 10240.
    """

    storage = "pubmed"
    builder = "scientific_papers/pubmed"
    default_input_length = 10240
    default_hparams_set = "pubmed_local_cluster10k"
