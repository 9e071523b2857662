"""Models and data for other people's programs, made up: nothing is fetched.

    python -m benchmarks.launched.made_up_data FOLDER

The folder gets bert-base-cased (its configuration, random weights, 28,996 words that mean nothing),
nyu-mll/glue (300 pairs of sentences of 10 to 48 words, MRPC's columns), text.txt, and nanochat's
two shards of documents. Sizes are those of the real ones, so is the memory of a step; the longest
sentence of a batch is not.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

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
    """Return different words of some syllables."""
    found: dict[str, None] = {}
    while len(found) < number:
        found["".join(chance.choices(SYLLABLES, k=chance.randint(1, 5)))] = None
    return list(found)


def main() -> int:
    """Write the folder."""
    folder, chance = Path(sys.argv[1]), random.Random(0)
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
    (folder / "text.txt").write_text(
        "".join(f"{text(20, 60)}\n" for _ in range(2000)), encoding="utf-8"
    )
    for shard in range(2):
        texts = pyarrow.table({"text": [text(300, 900) for _ in range(2000)]})
        path = documents / f"shard_{shard:05d}.parquet"
        pyarrow.parquet.write_table(texts, path, row_group_size=250)
    return 0


if __name__ == "__main__":
    sys.exit(main())
