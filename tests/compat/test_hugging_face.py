"""Rows of models of transformers, tiny and made here, are the gradients of each record alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_dpsco as dp
from tests.compat.harness import assert_rows
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import GradBatch
from torch_dpsco.rows.layers.recorded import is_recorded

hf = pytest.importorskip("transformers")
B = 3
SIZES = {"vocab_size": 30, "max_position_embeddings": 16}
BERT = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 8,
    "vocab_size": 30,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
DISTIL = {
    "n_layers": 1,
    "n_heads": 2,
    "dim": 8,
    "hidden_dim": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
LLAMA = {
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
}
T5 = {
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 16,
    "vocab_size": 30,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "d_model": 8,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


def two_berts() -> nn.Module:
    encoder, decoder = (
        hf.BertConfig(**SIZES, **BERT, is_decoder=second, add_cross_attention=second)
        for second in (False, True)
    )
    model = hf.EncoderDecoderModel(
        hf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    )
    model.encoder.pooler.requires_grad_(False)  # which the loss does not use
    return model


BUILD = {
    "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "GPT-2 untied": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, tie_word_embeddings=False)),
    "GPT-2 with private layers": lambda: dp.private_layers(BUILD["GPT-2"]()),
    "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, **BERT)),
    "BERT for classes": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES, **BERT)),
    "DistilBERT": lambda: hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(**SIZES, **DISTIL)
    ),
    "RoBERTa": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES, **BERT, pad_token_id=1)),
    "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **LLAMA)),
    "ViT": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(**BERT, image_size=8, patch_size=4)
    ),
    "two BERTs": two_berts,
}


def inputs(name: str) -> tuple[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    if name == "ViT":
        return (torch.randn(B, 3, 8, 8, generator=numbers).double(),)
    return (torch.randint(2, 30, (B, 6), generator=numbers),)


def losses(model: Any, x: Tensor) -> Tensor:
    if x.is_floating_point():
        return model(pixel_values=x).logits.square().flatten(1).sum(1)
    if model.config.is_encoder_decoder:
        return model(input_ids=x, decoder_input_ids=x.flip(1)).logits.square().flatten(1).sum(1)
    return (
        model(input_ids=x, attention_mask=torch.ones_like(x)).logits.square().flatten(1).sum(1)
    )


def made(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return build().double().train()


def assert_right(model: nn.Module, x: Tensor, tolerance: float = 1e-9) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    alone = []
    for i in range(B):
        found = torch.autograd.grad(losses(model, x[i : i + 1]).sum(), params)
        alone.append(found)
    expected = [torch.stack(parts) for parts in zip(*alone, strict=True)]
    dp.attach(model)
    losses(model, x).mean().backward()
    assert_rows(GradBatch.consume(params).dense(), expected, tolerance)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", BUILD)
def test_rows_of_models_of_transformers_are_those_of_the_records_alone(name):
    # norms of Llama are computed in float32
    assert_right(made(BUILD[name]), *inputs(name), 1e-5 if name == "Llama" else 1e-9)


def test_conv1d_of_transformers_is_recorded_by_private_layers():
    model = made(BUILD["GPT-2"])
    ours = dp.private_layers(model)
    state = copy.deepcopy(model.state_dict())
    assert {k: v.shape for k, v in ours.state_dict().items()} == {
        k: v.shape for k, v in state.items()
    }
    assert all(torch.equal(v, state[k]) for k, v in ours.state_dict().items())
    assert ours.lm_head.weight is ours.transformer.wte.weight  # still tied
    (x,) = inputs("GPT-2")
    torch.testing.assert_close(losses(ours, x), losses(model, x))
    dp.attach(ours)
    assert is_recorded(ours.transformer.h[0].attn.c_attn.inner)


@pytest.mark.filterwarnings(
    "ignore:In CPU autocast"
)  # Opacus', of layers on ids that it runs again
def test_models_of_transformers_without_right_rows_are_refused_until_these_are_frozen():
    t5 = lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5))  # noqa: E731
    bart = lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SIZES, **BART))  # noqa: E731
    for build, name, says in (
        (t5, "relative_attention_bias", "freeze the layer"),
        (bart, "embed_positions", "by position"),
    ):
        model = dp.attach(made(build))
        with pytest.raises(SequenceError, match=says):
            losses(model, *inputs("T5"))
        model = made(build).float()  # as T5 is, inside
        for place, layer in model.named_modules():
            if place.endswith(name):
                layer.requires_grad_(False)
        assert_right(model, *inputs("T5"), 1e-4)
