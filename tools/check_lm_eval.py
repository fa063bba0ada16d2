"""Lets `lm-eval` judge `ringspan serve` by its own client (`local-completions`) on tasks made of local data, and the same model computed
by Hugging Face's transformers; both must have the same scores.

    check_lm_eval.py PROGRAM                         a tiny random model on one rank and on three, some seconds
    check_lm_eval.py PROGRAM --model DIR             a model of your own, in f32
    check_lm_eval.py PROGRAM -- --tp 2               with other flags of `ringspan serve`

Three kinds of tasks show three kinds of requests: choices are scored by `echo` with `logprobs` after a context, texts by the same
without one, in windows where they are longer than the model's sequences, and answers are generated up to a stop string.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

from tiny_server import server, write_model

# Longest sequence of an evaluation, in tokens.
LONGEST = 192
# Largest difference of a log-likelihood, relative to itself and to 1.
TOLERANCE = 1e-3

SUBJECTS = ["ring", "river", "Zürich", "clock", "whale", "letter", "bridge", "数"]
FACTS = ["has no end", "is long", "sleeps", "was blue", "weighs 30 g", "has two sides\tand a back", "\"speaks\""]


def write_tasks(folder, count):
    """Writes three tasks of `count` documents each, and returns their names."""
    draw = random.Random(3)
    line = lambda: f"The {draw.choice(SUBJECTS)} {draw.choice(FACTS)}."
    documents = {
        "choices": [{"context": line() + " The " + draw.choice(SUBJECTS), "choices": draw.sample(FACTS, 4), "gold": draw.randrange(4)} for _ in range(count)],
        "texts": [{"text": " ".join(line() for _ in range(draw.choice([1, 5, 30])))} for _ in range(count)],
        "answers": [{"question": line() + "\n" + line(), "answer": draw.choice(FACTS)} for _ in range(count)],
    }  # fmt: skip
    metric = lambda name: {"metric": name, "aggregation": "mean", "higher_is_better": True}
    perplexity = lambda name, aggregation: {"metric": name, "aggregation": aggregation, "higher_is_better": False}
    forms = {
        "choices": {
            "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}", "doc_to_target": "gold",
            "metric_list": [metric("acc"), metric("acc_norm")],
        },
        "texts": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [perplexity("bits_per_byte", "bits_per_byte"), perplexity("byte_perplexity", "weighted_perplexity")],
        },
        "answers": {
            "output_type": "generate_until", "doc_to_text": "{{question}}\n", "doc_to_target": "{{answer}}",
            "metric_list": [metric("exact_match")],
            "generation_kwargs": {"until": ["e", "\n\n"], "do_sample": False, "temperature": 0, "max_gen_toks": 24},
        },
    }  # fmt: skip
    for name, form in forms.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents[name]))
        task = {"task": f"local_{name}", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(task | form))
    return [f"local_{name}" for name in forms]


def write_tiny_model(folder):
    write_model(folder)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def evaluate(tasks, names, kind, **arguments):
    """The scores of the tasks, and for each task what the model has answered to each request."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=names,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = {name: [sample["resps"] for sample in sorted(found["samples"][name], key=lambda one: one["doc_id"])] for name in names}
    return {name: numbers(found["results"][name]) for name in names}, samples


def numbers(results):
    """The scores of a task without their errors."""
    return {name: value for name, value in results.items() if isinstance(value, float) and "stderr" not in name}


def differences(expected, own):
    """How two answers differ: pairs of numbers, and whether all else is the same."""
    if isinstance(expected, (list, tuple)):
        if not isinstance(own, (list, tuple)) or len(expected) != len(own):
            return [], False
        parts = [differences(one, other) for one, other in zip(expected, own)]
        return [pair for pairs, _ in parts for pair in pairs], all(same for _, same in parts)
    try:
        # lm-eval writes log-likelihoods as texts into its samples.
        pair = (float(expected), float(own))
    except (TypeError, ValueError):
        return [], expected == own
    return [pair], True


def compare(expected, own, what):
    """Checks that two evaluations say the same; returns the largest difference of their log-likelihoods."""
    largest = 0.0
    for task, answers in expected[1].items():
        assert len(answers) == len(own[1][task]), task
        for index, (answer, other) in enumerate(zip(answers, own[1][task], strict=True)):
            pairs, same = differences(answer, other)
            error = max((abs(a - b) / max(1, abs(a)) for a, b in pairs), default=0.0)
            assert same and error < TOLERANCE, f"{what}: request {index} of {task} has {other} instead of {answer}"
            largest = max(largest, error)
    for task, scores in expected[0].items():
        assert scores.keys() == own[0][task].keys(), (scores, own[0][task])
        for name, score in scores.items():
            assert abs(score - own[0][task][name]) <= TOLERANCE * max(1, abs(score)), f"{what}: {task} {name} is {own[0][task][name]} instead of {score}"
    return largest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--model", type=Path, help="a folder in the layout of Hugging Face")
    parser.add_argument("--documents", type=int, default=12, help="documents of each task")
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    arguments, flags = parser.parse_args(given[:at]), given[at + 1 :]
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        # Nothing is fetched or kept.
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "cache"), "TQDM_DISABLE": "1"}
        model, tasks = arguments.model or work / "model", work / "tasks"
        if arguments.model is None:
            model.mkdir()
            write_tiny_model(model)
        tasks.mkdir()
        names = write_tasks(tasks, arguments.documents)
        expected = evaluate(tasks, names, "hf", pretrained=str(model), dtype="float32", device="cpu", max_length=LONGEST, batch_size=4)
        print(f"Hugging Face: {expected[0]}")
        for mesh in [flags] if flags else [[], ["--ring", "3"]]:
            command = [arguments.program, "serve", "--model", str(model), "--model-name", "judged", "--port", "0", "--dtype", "f32"]
            with server([*command, "--kv-cache", "256MiB", "--threads", "1", *mesh]) as (url, _):
                # The client takes two tokens less than this as the longest window of a text.
                client = {"max_length": LONGEST + 2, "num_concurrent": 4, "tokenizer_backend": "huggingface", "tokenizer": str(model)}
                own = evaluate(tasks, names, "local-completions", model="judged", base_url=url + "/v1/completions", **client)
            error = compare(expected, own, " ".join(mesh) or "one rank")
            print(f"lm-eval: the same scores with {' '.join(mesh) or 'one rank'}; log-likelihoods differ by at most {error:.1e}")


if __name__ == "__main__":
    main()
