"""The Trainer of transformers with private steps, on tiny models made from their configs; nothing is downloaded."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    TrainerCallback,
    TrainingArguments,
)

import torch_dpsco as dp
from tests.memory import peak
from tests.processes import launch
from torch_dpsco.errors import PrivacyError, SequenceError, UnknownSamplerError
from torch_dpsco.integrations.transformers import PrivateTrainer
from torch_dpsco.trial import sizes

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    ),  # peft asks for it
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
N, LENGTH, WORDS = 16, 6, 20
NEVER = (
    "loss",
    "train_loss",
    "grad_norm",
    "total_flos",
    "num_input_tokens_seen",
    "train_samples_per_second",
)


def bert(kind: Any = BertForSequenceClassification, **options: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config |= {
        "intermediate_size": 16,
        "max_position_embeddings": LENGTH,
        "hidden_dropout_prob": 0.0,
    }
    return kind(BertConfig(**config, attention_probs_dropout_prob=0.0, **options))


def distilbert() -> Any:
    torch.manual_seed(0)
    config = {
        "vocab_size": WORDS,
        "dim": 16,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 16,
        "dropout": 0.0,
    }
    config |= {
        "max_position_embeddings": LENGTH,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    }
    return DistilBertForSequenceClassification(DistilBertConfig(**config))


def gpt2(kind: Any = GPT2ForSequenceClassification) -> Any:
    torch.manual_seed(0)
    config = {
        "vocab_size": WORDS,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": LENGTH,
        "pad_token_id": 0,
    }
    config |= {
        "bos_token_id": 1,
        "eos_token_id": 1,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return kind(GPT2Config(**config))


def roberta() -> Any:
    torch.manual_seed(0)
    config = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config |= {"intermediate_size": 16, "max_position_embeddings": LENGTH + 2, "pad_token_id": 1}
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return RobertaForSequenceClassification(RobertaConfig(**config))


def llama() -> Any:
    torch.manual_seed(0)
    config = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config |= {
        "intermediate_size": 16,
        "max_position_embeddings": LENGTH,
        "num_key_value_heads": 2,
    }
    return LlamaForSequenceClassification(LlamaConfig(**config, pad_token_id=0))


def with_lora(model: Any, *targets: str) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, target_modules=list(targets), init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


MODELS: dict[str, Callable[[], Any]] = {
    "bert": bert,
    "bert, LoRA": lambda: with_lora(bert(), "query", "value"),
    "bert, eager attention": lambda: bert(attn_implementation="eager"),
    "bert, a number": lambda: bert(num_labels=1),
    "distilbert": distilbert,
    "distilbert, LoRA": lambda: with_lora(distilbert(), "q_lin", "v_lin"),
    "gpt2": gpt2,
    "gpt2, LoRA": lambda: with_lora(gpt2(), "c_attn"),
    "roberta": roberta,
    "llama": llama,
    "llama, LoRA": lambda: with_lora(llama(), "q_proj", "v_proj"),
}


def records(n: int = N, seed: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n):
        words = torch.randint(2, WORDS, (LENGTH,), generator=generator)
        mask = (
            torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (1,), generator=generator)
        ).long()
        label = torch.randint(0, 2, (), generator=generator)
        found.append({"input_ids": words * mask, "attention_mask": mask, "labels": label})
    return found


def full_plan(
    steps: int = 3, noise: float = 0.0, n: int = N, clip: float = 0.05, lr: float = 0.5
) -> Any:
    return dp.ClippedSGD.plan(
        n=n, clip=clip, noise_multiplier=noise, sampling="full", steps=steps, lr=lr
    )


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    given = {
        "use_cpu": True,
        "max_grad_norm": 0,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    given |= {
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "learning_rate": 0.5,
        "logging_steps": 1,
    }
    return TrainingArguments(output_dir=str(folder), **{**given, **options})


def private_run(
    folder: Path, model: Any, data: Any = None, plan: Any = None, **options: Any
) -> PrivateTrainer:
    own = {
        name: options.pop(name)
        for name in ("accountant", "callbacks", "eval_dataset")
        if name in options
    }
    plan = full_plan() if plan is None else plan
    args = arguments(folder, **{"max_steps": plan.steps, **options})
    return PrivateTrainer(
        model, args, train_dataset=records() if data is None else data, plan=plan, **own
    )


def numbers(model: nn.Module) -> Tensor:
    return torch.cat(
        [p.detach().flatten() for p in model.parameters() if p.requires_grad]
    ).clone()


def clipped_descent(
    model: Any, data: Any, steps: int, clip: float = 0.05, lr: float = 0.5, n: int = N
) -> Tensor:
    """The plain loop: one record at a time, by autograd and the model's own loss."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    for _ in range(steps):
        total = torch.zeros(sum(p.numel() for p in trained))
        for record in data:
            model.zero_grad()
            batch = {name: value[None] for name, value in record.items()}
            if model.config.num_labels == 1:
                batch["labels"] = batch["labels"].float()
            model(**batch).loss.backward()
            row = torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
            )
            total += row * min(1.0, clip / float(row.norm()))
        with torch.no_grad():
            for p, part in zip(trained, total.split([p.numel() for p in trained]), strict=True):
                p -= lr * part.view_as(p) / n
    return numbers(model)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_draws_come_in_several_sizes(tmp_path: Path) -> None:
    budget = dp.Budget(4.0, 1e-3, adjacency="add_remove")
    plan = dp.ClippedSGD.plan(n=N, budget=budget, clip=0.05, lr=0.5, steps=2, batch_size=8)
    trainer = private_run(tmp_path, bert(), plan=plan)
    trainer.train()
    assert trainer.optimizer._isolation.level == "rounded"


@pytest.mark.weekly
@pytest.mark.parametrize("rows", [64, 3])
@pytest.mark.parametrize("name", list(MODELS))
def test_the_trainer_makes_the_steps_of_a_plain_loop(
    name: str, rows: int, tmp_path: Path
) -> None:
    model, start = MODELS[name](), numbers(MODELS[name]())
    trainer = private_run(tmp_path, model, per_device_train_batch_size=rows)
    trainer.train()
    expected = clipped_descent(MODELS[name](), records(), steps=3)
    assert trainer.optimizer.steps == 3
    assert trainer.optimizer.finalized
    assert (expected - start).norm() > 1e-3
    # float32 gradients in other orders; the moves are some 1e-2 long
    torch.testing.assert_close(numbers(model), expected, rtol=0, atol=1e-6)


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["bert", "bert, LoRA"])
def test_no_record_moves_a_step_by_more_than_two_clips(name: str, tmp_path: Path) -> None:
    data = records()
    # its label is the less likely one, by weights so large that its gradient is huge
    worst = data[0] | {"labels": 1 - data[0]["labels"], "input_ids": torch.full((LENGTH,), 3)}
    answers, clip, lr = [], 0.05, 0.5
    for chosen in (data, [worst, *data[1:]], data[1:] + data[:1]):
        model = MODELS[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 30.0
        trainer = private_run(tmp_path, model, chosen, full_plan(steps=1, clip=clip, lr=lr))
        trainer.train()
        answers.append(numbers(model).double())
    moved = float((answers[0] - answers[1]).norm())
    rounding = 1e-5  # of float32 parameters that were multiplied by 30
    assert clip * lr / N < moved <= 2 * clip * lr / N + rounding
    assert (
        float((answers[0] - answers[2]).norm()) <= rounding
    )  # the order of records says nothing


@pytest.mark.slow
def test_lora_trains_its_adapters_alone(tmp_path: Path) -> None:
    model = MODELS["bert, LoRA"]()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    private_run(tmp_path, model).train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    assert all(p.requires_grad == (name in moved) for name, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "last layer"])
def test_a_model_of_which_little_is_trained_takes_the_memory_of_plain_steps(
    lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With probes and tests of sizes: frozen weights, most of the model, are not copied."""
    monkeypatch.setattr(sizes, "_FEWEST", 60)  # one of few records takes no less memory
    torch.manual_seed(0)
    shape = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 40_000,
        "n_positions": LENGTH,
    }
    undropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**shape, **undropped, pad_token_id=0, bos_token_id=1, eos_token_id=1)
    model: Any = GPT2ForSequenceClassification(config).requires_grad_(False)
    model.score.requires_grad_(True)
    if lora:
        model = with_lora(model, "c_attn")
    weights = sum(4 * p.numel() for p in model.parameters())
    plan = dp.ClippedSGD.plan(
        n=N,
        clip=0.5,
        noise_multiplier=1.0,
        adjacency="add_remove",
        batch_size=8,
        steps=2,
        lr=0.5,
    )
    trainer = private_run(tmp_path, model, plan=plan, per_device_train_batch_size=8)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert peak(trainer.train) < 0.5 * weights
    assert trainer.optimizer.steps == 2
    assert all(
        p.requires_grad or torch.equal(p, before[name]) for name, p in model.named_parameters()
    )


class Pooled(nn.Module):
    """Means over the words that are there: 0/0 for a filling row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        mask = attention_mask[..., None].float()
        pooled = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        return {"logits": self.head(pooled)}


@pytest.mark.weekly
def test_filling_rows_without_words_may_be_nan(tmp_path: Path) -> None:
    budget = dp.Budget(8.0, 1e-3, adjacency="add_remove")
    assert bool(Pooled()(torch.zeros(1, 2).long(), torch.zeros(1, 2))["logits"].isnan().all())
    plan = dp.ClippedSGD.plan(
        n=N, clip=0.5, budget=budget, sampling="poisson", batch_size=4, steps=4, lr=0.5
    )
    model = Pooled()
    trainer = private_run(tmp_path, model, plan=plan)
    trainer.train()
    assert trainer.optimizer.steps == 4
    assert bool(numbers(model).isfinite().all())


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", ["tokens", "words to come"])
def test_tokens_of_a_record_do_not_weigh_on_the_loss_of_others(
    kind: str, tmp_path: Path
) -> None:
    model = bert(BertForTokenClassification) if kind == "tokens" else gpt2(GPT2LMHeadModel)
    data = records()
    for k, record in enumerate(data):
        labels = record["input_ids"] % 2 if kind == "tokens" else record["input_ids"].clone()
        record["labels"] = labels.masked_fill(torch.arange(LENGTH) > k % LENGTH, -100)
    trainer = private_run(tmp_path, model, data)
    batch = {name: torch.stack([record[name] for record in data]) for name in data[0]}
    with torch.no_grad():
        together = float(trainer.compute_loss(model, batch))
        alone = [
            float(trainer.compute_loss(model, {k: v[i : i + 1] for k, v in batch.items()}))
            for i in range(N)
        ]
    assert together == pytest.approx(sum(alone) / N, rel=1e-5)
    counted = [i for i in range(N) if alone[i]]
    own = {name: value[counted[0], None] for name, value in batch.items()}
    assert alone[counted[0]] == pytest.approx(model(**own).loss.item(), rel=1e-5)
    trainer.train()
    assert trainer.optimizer.steps == 3


@pytest.mark.slow
def test_a_loss_of_your_own_is_shown_one_record_at_a_time(tmp_path: Path) -> None:
    shapes = []

    def own(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        shapes.append((outputs.logits.shape, labels.shape, num_items_in_batch))
        return nn.functional.cross_entropy(outputs.logits, labels)

    model = bert()
    trainer = PrivateTrainer(
        model,
        arguments(tmp_path, max_steps=3),
        train_dataset=records(),
        plan=full_plan(),
        compute_loss_func=own,
    )
    trainer.train()
    assert set(shapes) == {((1, 2), (1,), None)}
    torch.testing.assert_close(
        numbers(model), clipped_descent(bert(), records(), steps=3), rtol=0, atol=1e-6
    )


# -- what is seen -----------------------------------------------------------------------------------------------------


class Seen(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any
    ) -> None:
        self.logs.append(dict(logs))


def poisson_plan(epsilon: float = 8.0) -> Any:
    budget = dp.Budget(epsilon, 1e-3, adjacency="add_remove")
    return dp.ClippedSGD.plan(
        n=N, clip=0.5, budget=budget, sampling="poisson", batch_size=4, epochs=2, lr=0.5
    )


def _seen(folder: Path, data: Any) -> tuple[list[dict[str, float]], Any]:
    seen = Seen()
    trainer = private_run(
        folder, bert(), data, poisson_plan(), callbacks=[seen], per_device_train_batch_size=2
    )
    output = trainer.train()
    assert math.isnan(output.training_loss)
    assert seen.logs == [
        {k: v for k, v in line.items() if k != "step"} for line in trainer.state.log_history
    ]
    return [*seen.logs, output.metrics, dataclasses.asdict(trainer.state)], trainer


@pytest.mark.weekly
def test_nothing_private_is_logged(tmp_path: Path) -> None:
    def public(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        timed = ("train_runtime", "train_steps_per_second", "log_history")
        return [
            {name: value for name, value in line.items() if name not in timed} for line in lines
        ]

    first, trainer = _seen(tmp_path, records())
    other, larger = _seen(tmp_path, records(N + 5, seed=8))
    assert not any(
        name in line for line in [*first[:-1], *trainer.state.log_history] for name in NEVER
    )
    assert public(first) == public(other)  # plan and ledger are all that they are made of
    assert first[-1]["total_flos"] == 0
    loader = larger.callback_handler.train_dataloader
    assert len(loader.dataset) == N + 5
    assert larger.num_examples(loader) == N  # the public number


@pytest.mark.weekly
def test_no_logged_epsilon_is_less_than_was_spent(tmp_path: Path) -> None:
    plan = poisson_plan(epsilon=3.14159)
    trainer = private_run(tmp_path, bert(), plan=plan)
    trainer.train()
    steps = [line for line in trainer.state.log_history if "learning_rate" in line]
    assert (
        len(steps) == plan.steps == trainer.optimizer.steps == len(trainer.optimizer.accountant)
    )
    for k, line in enumerate(steps, start=1):
        spent = dp.Accountant(adjacency="add_remove")
        spent.record(plan.design.event(trainer.optimizer.oracle.event(), k))
        epsilon = spent.get_epsilon(1e-3)
        assert epsilon <= line["epsilon"] <= epsilon * 1.001
        assert line["epsilon"] == float(f"{line['epsilon']:.4g}")
        assert line["delta"] >= 1e-3


@pytest.mark.weekly
def test_evaluation_and_files_hold_the_released_answer(tmp_path: Path) -> None:
    model, shown = bert(), []
    trainer = private_run(
        tmp_path, model, eval_dataset=records(4), eval_strategy="steps", eval_steps=1
    )
    released = dp.ClippedSGD.released

    class Counted(dp.ClippedSGD):
        def released(self) -> Any:
            shown.append(self.steps)
            return released(self)

    trainer.create_optimizer().__class__ = Counted
    trainer.train()
    assert shown == [1, 2, 3]
    answer = numbers(model)
    trainer.save_model(str(tmp_path / "answer"))
    assert not hasattr(model, "_dpsco")
    assert shown == [1, 2, 3, 3]
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "answer")
    assert torch.equal(numbers(saved), answer)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        trainer.state.log_history[-3]["eval_loss"]
    )
    with pytest.raises(SequenceError, match="make a new PrivateTrainer"):
        trainer.train()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.cases(9, 2)
@pytest.mark.parametrize(
    "wrong",
    [
        {"max_grad_norm": 0.5},
        {"activation_checkpointing": True},
        {"auto_find_batch_size": True},
        {"neftune_noise_alpha": 0.1},
        {"torch_compile": True},
        {"include_num_input_tokens_seen": "all"},
        {"train_sampling_strategy": "group_by_length"},
        {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "no"},
        {"hub_strategy": "checkpoint", "push_to_hub": True},
        {"max_steps": 4},
        {"max_steps": -1, "num_train_epochs": 2},
        {"learning_rate": 0.4},
    ],
    ids=str,
)
def test_arguments_without_a_private_counterpart_are_refused(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    name = "learning_rate" if "learning_rate" in wrong else next(iter(wrong))
    with pytest.raises(ValueError, match=f"{name}.* must be"):
        private_run(tmp_path, bert(), **wrong)


def test_a_trainer_with_a_sampler_of_its_own_is_refused(tmp_path: Path) -> None:
    class Weighted(PrivateTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.WeightedRandomSampler([1.0] * N, N)

    with pytest.raises(
        UnknownSamplerError,
        match=r"_get_train_sampler must not be overridden.*Subset.*pos_weight",
    ):
        Weighted(bert(), arguments(tmp_path), train_dataset=records(), plan=full_plan())


@pytest.mark.slow
def test_a_plan_is_made_of_the_arguments_or_given(tmp_path: Path) -> None:
    budget = dp.Budget(2.0, 1e-3)
    args = arguments(tmp_path, num_train_epochs=3)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = 2, 2
    trainer = PrivateTrainer(bert(), args, train_dataset=records(), budget=budget, clip=1.0)
    assert trainer.plan == dp.NetSGD.plan(
        budget=budget, n=N, clip=1.0, batch_size=4, lr=0.5, epochs=3, average="last"
    )
    with pytest.raises(ValueError, match="epsilon and delta must be given"):
        PrivateTrainer(bert(), args, train_dataset=records(), n=N)
    with pytest.raises(ValueError, match="beside n"):
        PrivateTrainer(bert(), args, train_dataset=records(), plan=full_plan(), n=N)
    with pytest.raises(ValueError, match="args must be given"):
        PrivateTrainer(bert(), train_dataset=records(), plan=full_plan())
    with pytest.raises(ValueError, match="in place of model_init"):
        PrivateTrainer(None, args, train_dataset=records(), plan=full_plan(), model_init=bert)


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"recipe": True}], ids=str)
def test_a_budget_and_default_arguments_are_enough(
    options: dict[str, bool], tmp_path: Path
) -> None:
    usual = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    recipe = options.pop("recipe", False)
    usual |= {"eval_strategy": "epoch", "num_train_epochs": 2, **options}
    args, model = TrainingArguments(str(tmp_path), **usual), bert()
    given = {"train_dataset": records(), "eval_dataset": records(4), "recipe": recipe}
    with pytest.warns(UserWarning, match="max_grad_norm has no meaning here"):
        trainer = PrivateTrainer(model, args, epsilon=8.0, delta=1e-2, **given)
    trainer.train()
    plan, before = trainer.plan, numbers(bert())
    assert (plan.batch_size, plan.steps) == ((3, 120) if recipe else (8, 4))
    assert trainer.optimizer.steps == plan.steps
    assert trainer.optimizer.accountant.get_epsilon(1e-2) == plan.epsilon() <= 8.0
    level = trainer.optimizer._isolation.level
    assert level == ("slots" if options else "rounded")
    rate = trainer.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(plan.lr if recipe else 0.0)  # the default schedule ends at 0
    moved = float((numbers(model) - before).abs().max())
    assert moved > 0.1 if recipe else 1e-5 < moved < 3e-4  # 4 steps of AdamW at 5e-5


def test_rows_in_bfloat16_are_those_of_records(tmp_path: Path) -> None:
    model = bert()
    trainer = private_run(tmp_path, model, bf16=True)
    trainer.train()
    found = (numbers(model) - numbers(bert())).double()
    exact = (clipped_descent(bert(), records(), 3) - numbers(bert())).double()
    assert float(found @ exact / found.norm() / exact.norm()) > 0.99
    assert float(found.norm() / exact.norm()) == pytest.approx(1.0, abs=0.05)


class Words:
    """As much of a tokenizer as `DataCollatorWithPadding` asks for."""

    deprecation_warnings: dict[str, bool] = {}  # noqa: RUF012

    def pad(
        self, features: list[dict[str, Any]], padding: Any = True, **options: Any
    ) -> dict[str, Tensor]:
        longest = max(len(feature["input_ids"]) for feature in features)
        length = options["max_length"] if padding == "max_length" else longest
        found = {
            k: [[*f[k], *[0] * (length - len(f[k]))] for f in features]
            for k in ("input_ids", "attention_mask")
        }
        return {k: torch.tensor(v) for k, v in found.items()} | {
            "labels": torch.tensor([f["label"] for f in features])
        }


def test_labels_of_text_which_collators_leave_out_are_asked_for_as_numbers(
    tmp_path: Path,
) -> None:
    data = [record | {"labels": "yes"} for record in records()]
    trainer = PrivateTrainer(
        bert(), arguments(tmp_path, max_steps=3), train_dataset=data, plan=full_plan()
    )
    with pytest.raises(ValueError, match=r"'labels', one tensor .*: numbers, since collators"):
        trainer.train()
    assert not len(trainer.optimizer.accountant)


@pytest.mark.weekly
def test_batches_that_are_padded_to_their_longest_record_are_refused(tmp_path: Path) -> None:
    sizes = [3 + k % 3 for k in range(N)]
    data = [{"input_ids": [4] * k, "attention_mask": [1] * k, "label": k % 2} for k in sizes]
    for padding in (True, "max_length"):
        collate = DataCollatorWithPadding(Words(), padding=padding, max_length=LENGTH)
        args = arguments(tmp_path, max_steps=3, remove_unused_columns=False)
        trainer = PrivateTrainer(
            bert(), args, train_dataset=data, plan=full_plan(), data_collator=collate
        )
        if padding == "max_length":
            trainer.train()
            assert trainer.optimizer.steps == 3
            continue
        with pytest.raises(ValueError, match="one public length"):
            trainer.train()
        assert not trainer.optimizer.steps
        assert not len(trainer.optimizer.accountant)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        pooled = self.words(input_ids).mean(1)
        return {"logits": self.head(pooled - pooled.mean(0))}


@pytest.mark.slow
def test_models_that_mix_records_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    trainer = private_run(tmp_path, Mixing())
    with pytest.raises(PrivacyError, match="coupled records"):
        trainer.train()
    assert not len(trainer.optimizer.accountant)


# -- interruptions ----------------------------------------------------------------------------------------------------


class Crash(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def _resumable(folder: Path, plan: Any, **options: Any) -> PrivateTrainer:
    ledger = dp.Accountant(plan.budget, ledger_path=folder / "ledger")
    saves = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    return private_run(folder, bert(), plan=plan, accountant=ledger, **saves, **options)


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore:1 steps after step 4 were lost")
def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    plan = poisson_plan()
    first = _resumable(tmp_path, plan, callbacks=[Crash(4)])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first.optimizer.steps == 5
    first.optimizer.accountant.close()
    state = (tmp_path / "checkpoint-4" / "private.pt").stat()
    assert state.st_mode & 0o077 == 0  # for its owner only
    again = _resumable(tmp_path, plan)
    again.train(resume_from_checkpoint=True)
    optimizer = again.optimizer
    assert optimizer.steps == again.state.global_step == plan.steps == 8
    assert optimizer.run == first.optimizer.run
    assert len(optimizer.accountant) == 8
    assert optimizer.accountant.get_epsilon(1e-3) <= 8.0
    made = [line["step"] for line in again.state.log_history if "learning_rate" in line]
    assert made == [1, 2, 3, 4, 6, 7, 8]  # the lost step is not made again
    rates = [
        line["learning_rate"] for line in again.state.log_history if "learning_rate" in line
    ]
    assert rates == pytest.approx([0.5 * (9 - step) / 8 for step in made])


@pytest.mark.weekly
def test_an_interrupted_trainer_goes_on_by_itself(tmp_path: Path) -> None:
    plan = poisson_plan()
    trainer = private_run(tmp_path, bert(), plan=plan, callbacks=[Crash(2)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Crash)
    trainer.train()
    assert trainer.optimizer.steps == plan.steps == len(trainer.optimizer.accountant)


@pytest.mark.slow
def test_a_checkpoint_without_a_ledger_file_is_not_resumed(tmp_path: Path) -> None:
    trainer = private_run(tmp_path, bert(), save_strategy="steps", save_steps=1)
    trainer.train()
    assert not list(tmp_path.glob("*/private.pt"))
    assert not list(tmp_path.glob("*/optimizer.*"))
    with pytest.raises(ValueError, match="ledger file"):
        private_run(tmp_path, bert()).train(resume_from_checkpoint=True)


def _two(rank: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("default")
    # as torchrun does
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    model = bert()
    trainer = private_run(Path(folder), model, plan=poisson_plan(), eval_dataset=records(4))
    trainer.train()
    ledger = trainer.optimizer.accountant.ledger.digest()
    assert trainer.accelerator.num_processes == torch.distributed.get_world_size() == 2
    return {"answer": numbers(model), "ledger": ledger, "score": trainer.evaluate()["eval_loss"]}


@pytest.mark.weekly
def test_two_processes_make_one_run(tmp_path: Path) -> None:
    first, second = launch(_two, 2, tmp_path, str(tmp_path))
    assert torch.equal(first["answer"], second["answer"])
    assert first["ledger"] == second["ledger"]
    assert first["score"] == second["score"]
