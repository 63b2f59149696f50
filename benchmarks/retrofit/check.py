"""Checks the model of keras_hub with an implementation of its own in PyTorch.

python -m benchmarks.retrofit.check
"""

import numpy as np
import tokenizers
import torch
from keras import ops

from benchmarks.retrofit import smollm2
from benchmarks.retrofit import torch_model

TEXT = (
    "The city of Vienna had 2,031,000 inhabitants in 2024, and its oldest café was "
    "opened in 1683.\n\n  def area(self):\n      return 3.14159 * self.radius ** 2\n"
)
NUM_TOKENS = 20


def main():
    """Prints the largest difference of logits, and whether tokens are equal."""
    file = smollm2.File()
    lm = smollm2.load()
    tokenizer = lm.preprocessor.tokenizer
    ids = np.asarray(tokenizer(TEXT))
    print("token ids equal:", list(ids) == ids_by_tokenizers(file))
    print("text comes back:", tokenizer.detokenize(ids) == TEXT)
    with torch.no_grad():
        other = torch_model.TorchLlama(file)
        expected = other.logits(ids).numpy()
        own = ops.convert_to_numpy(logits(lm, ids))
        print("logits differ by at most:", np.abs(own - expected).max())
        continuation = other.greedy(ids, NUM_TOKENS)
    print("greedy tokens equal:", greedy(lm, ids, NUM_TOKENS) == continuation)
    print(repr(tokenizer.detokenize(continuation)))


def ids_by_tokenizers(file):
    """Returns the ids of the text by a tokenizer that is made by hand."""
    vocabulary = {x: i for i, x in enumerate(file.setting("tokenizer.ggml.tokens"))}
    merges = [tuple(x.split(" ")) for x in file.setting("tokenizer.ggml.merges")]
    model = tokenizers.models.BPE(vocabulary, merges)
    # Digits, then the words of GPT-2 between them.
    split = tokenizers.pre_tokenizers
    ids = []
    whole = split.ByteLevel(add_prefix_space=False, use_regex=True)
    for part, _ in split.Digits(individual_digits=True).pre_tokenize_str(TEXT):
        for word, _ in whole.pre_tokenize_str(part):
            ids += [token.id for token in model.tokenize(word)]
    return ids


def logits(lm, ids):
    """Returns the logits of one sequence, `[length, vocabulary]`."""
    inputs = {"token_ids": ids[None], "padding_mask": np.ones_like(ids)[None]}
    return lm(inputs)[0]


def greedy(lm, ids, number):
    """Returns the most likely continuation by `generate`."""
    # Ids in place of texts.
    lm = type(lm)(backbone=lm.backbone, preprocessor=None)
    lm.compile(sampler="greedy")
    length = len(ids) + number
    prompt = {
        "token_ids": np.pad(ids, (0, number))[None],
        "padding_mask": (np.arange(length) < len(ids))[None],
    }
    found = lm.generate(prompt, stop_token_ids=None)["token_ids"]
    return ops.convert_to_numpy(found)[0, len(ids) : length].tolist()


if __name__ == "__main__":
    main()
