"""trl: training of a small Llama with trl's defaults; the tokenizer and the data are made here."""

import datasets
import pytest
import tokenizers
import transformers
import trl

WORDS = ["<pad>", "<eos>", "<unk>", "a", "b", "c"]


@pytest.fixture
def tokenizer():
    words = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture
def model():
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


# On a T4 its products of bfloat16 with results of float32 are refused, as on the GPU itself.
@pytest.mark.gpu_memory(card="L4")
def test_supervised_fine_tuning(model, tokenizer, tmp_path):
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=4,
            report_to="none",
            save_strategy="no",
            dataset_text_field="text",
        ),
        train_dataset=datasets.Dataset.from_dict({"text": ["a b c a b c"] * 16}),
        processing_class=tokenizer,
    )
    trainer.train()


@pytest.mark.gpu_memory(card="L4")
def test_group_relative_policy_optimization(model, tokenizer, tmp_path):
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=8,
            report_to="none",
            save_strategy="no",
            max_completion_length=8,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a b c a b c"] * 16}),
        processing_class=tokenizer,
    )
    trainer.train()
