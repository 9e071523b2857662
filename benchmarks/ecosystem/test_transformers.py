"""transformers: a Trainer's loop over a small BERT."""

import pytest
import torch
import transformers


@pytest.mark.gpu_memory(card="T4")
def test_a_trainer_s_steps(tmp_path):
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    rows = [{"input_ids": torch.zeros(64, dtype=torch.long), "labels": 0}] * 16
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        report_to="none",
        save_strategy="no",
    )
    model = transformers.BertForSequenceClassification(config)
    transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
