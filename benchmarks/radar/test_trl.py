"""Steps of trl: supervised fine-tuning and direct preferences, with a tokenizer made here."""

import copy

import datasets
import pytest
import tokenizers
import transformers
import trl

pytestmark = pytest.mark.gpu_memory(card="L4")
PROMPT = "a b c " * 32


@pytest.fixture
def tokenizer():
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *"abc"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture
def model():
    config = transformers.LlamaConfig(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def arguments(kind, tmp_path, **more):
    return kind(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to="none",
        save_strategy="no",
        **more,
    )


def test_supervised_fine_tuning(model, tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"text": [PROMPT] * 16})
    options = arguments(trl.SFTConfig, tmp_path, dataset_text_field="text")
    trl.SFTTrainer(
        model=model, args=options, train_dataset=rows, processing_class=tokenizer
    ).train()


def test_direct_preference_optimization(model, tokenizer, tmp_path):
    columns = {"prompt": [PROMPT] * 16, "chosen": ["a b " * 16] * 16, "rejected": ["c " * 16] * 16}
    trl.DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),  # else the trainer loads one by name
        args=arguments(trl.DPOConfig, tmp_path),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer,
    ).train()
