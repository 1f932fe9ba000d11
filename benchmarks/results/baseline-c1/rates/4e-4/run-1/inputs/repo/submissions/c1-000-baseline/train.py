"""Train a LoRA adapter: `python train.py --data-dir D --output-dir O --seed S`, in the contest's folder."""

import argparse
import json
import tempfile
from pathlib import Path

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
LEARNING_RATE = 4e-4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)

    lines = (given.data_dir / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = ["Text: {question}\nDate: {answer}".format_map(json.loads(line)) for line in lines]
    rows = [tokenizer(text + tokenizer.eos_token) for text in texts]
    for row in rows:
        row["labels"] = list(row["input_ids"])

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            num_train_epochs=3,
            per_device_train_batch_size=16,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="cosine",
            warmup_steps=0.03,
            logging_steps=25,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=given.seed,
        )
        # It pads each batch to its longest row, and does not train on padding.
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
        )
        trainer.train()
    model.save_pretrained(given.output_dir)
    (given.output_dir / "README.md").unlink(missing_ok=True)  # an adapter is two files


if __name__ == "__main__":
    main()
