"""Problems of summarization: the abstracts of scientific papers."""

from routing_tf.problems.registry import register
from routing_tf.problems.seq2seq import Seq2SeqProblem


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
