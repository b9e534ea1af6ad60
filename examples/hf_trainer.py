"""The Trainer of transformers with private steps: a small BERT, adapted to private texts by LoRA.

    python examples/hf_trainer.py            # 4,000 made-up texts, eps = 3 and without privacy, about 20 s
    python examples/hf_trainer.py --quick    # a smoke test

Nothing is downloaded: texts are up to 12 words of 60, of which a class has favorites. The model is first trained on
public texts, which have other favorites for a third of the words, and then adapted: rank 4 in attention, a new head.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import peft
import torch
from pictures import bars
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import torch_dpsco as dp
from torch_dpsco.integrations.transformers import PrivateTrainer

EPSILON, DELTA = 3.0, 1e-5
N, LENGTH, WORDS = 4000, 12, 60
PUBLIC, PRIVATE, TEST = 1, 2, 3


def texts(n: int, seed: int, *, public: bool = False) -> list[dict[str, Any]]:
    """Returns records as a tokenizer gives them, padded to one public length."""
    rng, tastes = np.random.default_rng(seed), np.random.default_rng(0).normal(size=WORDS)
    if public:
        tastes[: WORDS // 3] *= -1.0
    found = []
    for label in rng.integers(0, 2, n):
        weights = np.exp((2 * label - 1) * tastes / 2)
        words, size = rng.choice(WORDS, LENGTH, p=weights / weights.sum()) + 1, rng.integers(6, LENGTH + 1)
        mask = np.arange(LENGTH) < size
        found.append({"input_ids": words * mask, "attention_mask": mask.astype(np.int64), "labels": int(label)})
    return found


def accuracy(prediction: Any) -> dict[str, float]:
    """Returns the share of labels that are right."""
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def arguments(folder: str, epochs: float, lr: float, rows: int, parts: int = 1) -> TrainingArguments:
    """Returns what all three runs have in common; rows are those of a step, in so many parts."""
    return TrainingArguments(
        output_dir=folder, num_train_epochs=epochs, learning_rate=lr, per_device_train_batch_size=rows // parts,
        gradient_accumulation_steps=parts, max_grad_norm=0,
        per_device_eval_batch_size=500, use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no",
        logging_steps=20,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints test accuracy with and without privacy, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    quick = parser.parse_args(argv).quick
    n, epochs = (400, 1.0) if quick else (N, 10.0)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS + 1, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    start, test = BertForSequenceClassification(config), texts(2000, TEST)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(start, arguments(folder, epochs / 2, 3e-3, 64), train_dataset=texts(n, PUBLIC, public=True)).train()
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
        models = [peft.get_peft_model(copy.deepcopy(start), copy.deepcopy(lora)) for _ in range(2)]
        given: dict[str, Any] = {"train_dataset": texts(n, PRIVATE), "eval_dataset": test, "compute_metrics": accuracy}
        plain = Trainer(models[0], arguments(folder, epochs, 3e-3, 256), **given)
        plain.train()
        budget = dp.Budget(EPSILON, DELTA, adjacency="add_remove")
        sizes: dict[str, Any] = {"n": n, "clip": 1.0}
        private = PrivateTrainer(models[1], arguments(folder, epochs, 3e-3, 256, 2), budget=budget, **sizes, **given)
        private.train()
        unchanged = Trainer(start, arguments(folder, 1, 1e-3, 64), eval_dataset=test, compute_metrics=accuracy)
        runs = {"public": unchanged, "baseline": plain, "private": private}
        figures = {name: float(run.evaluate()["eval_accuracy"]) for name, run in runs.items()}
    for name, words in (("public", "not adapted"), ("baseline", "not private"), ("private", "private")):
        print(f"{words:<12} accuracy {figures[name]:.4f}")
    bars("accuracy", figures)
    report = private.optimizer.report().figures
    print(f"spent: {report}")
    return figures | {"epsilon": report.epsilon, "steps": float(private.optimizer.steps)}


if __name__ == "__main__":
    main()
