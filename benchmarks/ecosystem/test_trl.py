"""trl: supervised fine-tuning of a small Llama; the tokenizer and the data are made here."""

import datasets
import pytest
import tokenizers
import transformers
import trl


# On a T4 its products of bfloat16 with results of float32 are refused, as on the GPU itself.
@pytest.mark.gpu_memory(card="L4")
def test_supervised_fine_tuning(tmp_path):
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", "a", "b", "c"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
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
