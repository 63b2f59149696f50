import io

from routing_tf.generation import display
from routing_tf.generation import texts
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import SubwordTokenizer
from tests.progress_test import Terminal


def test_a_sample_of_subwords_goes_on_behind_its_prompt():
    vocabulary = SubwordTokenizer.build_vocabulary(["one fish two fish"], 64)
    tokenizer = SubwordTokenizer(vocabulary)
    sample = texts.TextSample(tokenizer, "one fish")
    ids = tokenizer.tokenize("two fish").numpy().tolist()
    assert sample.token_ids[0] == 0
    assert tokenizer.detokenize(sample.token_ids[1:]) == "one fish"
    for id in ids:
        sample.add(id, stop_token_id=1)
    assert sample.add(1, stop_token_id=1) == ""
    assert sample.to_dict() == {
        "prompt": "one fish",
        "sample": 0,
        "continuation": " two fish",
        "tokens": len(ids) + 1,
        "ended": True,
    }


def test_what_is_not_complete_comes_at_the_end():
    sample = texts.TextSample(ByteTokenizer(), "")
    assert sample.token_ids == [0]
    assert [sample.add(byte + 2) for byte in b"a\xe2\x82"] == ["a", "", ""]
    assert sample.end() == "\ufffd"
    assert sample.continuation == "a\ufffd"


def test_batches_have_one_size(monkeypatch):
    sizes = []

    class Echo:
        """Stands for a `TokenStream`: the last token of a prompt again and again."""

        def __init__(self, lm, sampler, num_tokens):
            self.num_tokens = num_tokens

        def __call__(self, prompts):
            sizes.append(len(prompts))
            for position in range(1, self.num_tokens):
                yield position, [prompt[: position + 1][-1] for prompt in prompts]

    monkeypatch.setattr(texts, "TokenStream", Echo)
    samples = [texts.TextSample(ByteTokenizer(), p) for p in ("ab", "c", "d")]
    continuation = texts.Continuation(None, None, max_length=5, batch_size=2)
    speed = display.Speed()
    done = [each for each, text in continuation.run(samples, speed) if text is None]
    assert done == samples
    assert sizes == [2, 2]
    assert [each.continuation for each in samples] == ["bb", "ccc", "ddd"]
    assert str(speed).startswith("8 tokens")


def test_samples_of_a_prompt_read_it_once():
    class Counting(ByteTokenizer):
        num_texts = 0

        def tokenize(self, inputs):
            self.num_texts += 1
            return super().tokenize(inputs)

    tokenizer = Counting()
    first = texts.TextSample(tokenizer, "né")
    samples = [first, first.another(1), first.another(2)]
    assert tokenizer.num_texts == 1
    for sample, text in zip(samples, ("a", "b", "c")):
        assert sample.add(2 + ord(text)) == text
    assert [each.number for each in samples] == [0, 1, 2]
    assert [each.to_dict()["continuation"] for each in samples] == ["a", "b", "c"]
    assert all(each.prompt == "né" for each in samples)


def test_control_characters_are_not_shown_on_a_terminal():
    for file, expected in ((Terminal(), "a\ufffd[2J\té\n"), (io.StringIO(), None)):
        output = display.Output(file)
        output.write("a\x1b[2J\té")
        output.end_line()
        output.end_line()
        assert file.getvalue() == (expected or "a\x1b[2J\té\n")


def test_speed_leaves_the_first_tokens_out(monkeypatch):
    now = 100.0
    monkeypatch.setattr(display.time, "perf_counter", lambda: now)
    speed = display.Speed()
    now = 110.0
    assert str(speed) == "no tokens in 10.0 s"
    speed.add(2)
    assert str(speed) == "2 tokens in 10.0 s"
    now = 112.0
    speed.add(2)
    speed.add(1000)
    assert str(speed) == (
        "1,004 tokens in 12.0 s: the first after 10.0 s, then 501.0 tokens/s"
    )
