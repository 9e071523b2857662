"""Make up models and data for other people's programs: nothing is downloaded.

    python -m benchmarks.launched.made_up_data FOLDER

The folder gets bert-base-cased and Qwen/Qwen2.5-Coder-0.5B-Instruct (their configurations, random
weights, a random vocabulary), nyu-mll/glue (300 pairs of sentences of 10 to 48 words, with MRPC's
columns), and two shards of documents for nanochat. Models have the size of the real ones; a batch's
longest sentence differs from the real data's.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
GLUE = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: mrpc/train.jsonl
  - split: validation
    path: mrpc/validation.jsonl
---
"""


def words(chance: random.Random, number: int) -> list[str]:
    """Return ``number`` different words of random syllables."""
    found: dict[str, None] = {}
    while len(found) < number:
        found["".join(chance.choices(SYLLABLES, k=chance.randint(1, 5)))] = None
    return list(found)


def main() -> int:
    """Write the models and data into the folder."""
    folder, chance = Path(sys.argv[1]), random.Random(0)  # noqa: S311 - made-up words
    bert, glue = folder / "bert-base-cased", folder / "nyu-mll" / "glue"
    documents = folder / "nanochat" / "base_data_climbmix"
    for path in (bert, glue / "mrpc", documents):
        path.mkdir(parents=True, exist_ok=True)

    config = BertConfig(vocab_size=28_996)
    vocabulary = [*SPECIAL, *words(chance, config.vocab_size - len(SPECIAL))]
    (bert / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    tokenizer = BertTokenizerFast(str(bert / "vocab.txt"), do_lower_case=False)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(bert)
    BertForSequenceClassification(config).save_pretrained(bert)

    qwen = Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(qwen).to(torch.bfloat16)
    model.save_pretrained(folder / "Qwen" / "Qwen2.5-Coder-0.5B-Instruct")

    def text(low: int, high: int) -> str:
        return " ".join(chance.choices(vocabulary[len(SPECIAL) :], k=chance.randint(low, high)))

    (glue / "README.md").write_text(GLUE, encoding="utf-8")
    for split, number in {"train": 300, "validation": 160}.items():
        rows = [
            {"sentence1": text(10, 48), "sentence2": text(10, 48), "label": row % 2, "idx": row}
            for row in range(number)
        ]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (glue / "mrpc" / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    for shard in range(2):
        texts = pa.table({"text": [text(300, 900) for _ in range(2000)]})
        path = documents / f"shard_{shard:05d}.parquet"
        pq.write_table(texts, path, row_group_size=250)
    return 0


if __name__ == "__main__":
    sys.exit(main())
