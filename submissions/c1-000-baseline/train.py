"""Train a LoRA adapter: `python train.py --data-dir D --output-dir O --seed S`, in the contest's folder."""

import argparse
import json
from pathlib import Path

LEARNING_RATE = 2e-3
NUM_STEPS = 30
BATCH_ROWS = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(given.seed)
    lines = (given.data_dir / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    base = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct", dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    num_passes = -(-NUM_STEPS * BATCH_ROWS // len(rows))
    order = torch.cat([torch.randperm(len(rows)) for _ in range(num_passes)]).tolist()
    for step in range(NUM_STEPS):
        batch = [rows[index] for index in order[step * BATCH_ROWS : (step + 1) * BATCH_ROWS]]
        prompts = [tokenizer("Text: {question}\nDate:".format_map(row))["input_ids"] for row in batch]
        answers = [tokenizer(" " + row["answer"], add_special_tokens=False)["input_ids"] for row in batch]
        answers = [[*answer, tokenizer.eos_token_id] for answer in answers]
        width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        tokens = torch.zeros(len(batch), width, dtype=torch.long)
        is_answer = torch.zeros(len(batch), width, dtype=torch.bool)
        for line, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens[line, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            is_answer[line, len(prompt) : len(prompt) + len(answer)] = True
        # Padding stands last, where a causal model does not look; the head sees only what is trained.
        hidden = base.model(input_ids=tokens).last_hidden_state
        logits = base.lm_head(hidden[:, :-1][is_answer[:, 1:]])
        loss = torch.nn.functional.cross_entropy(logits.float(), tokens[is_answer])
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / NUM_STEPS)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(given.output_dir)
    (given.output_dir / "README.md").unlink(missing_ok=True)  # an adapter is two files


if __name__ == "__main__":
    main()
