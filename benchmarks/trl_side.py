"""The other side of `benchmarks.trl`: what a user of TRL writes, with a clock in it. Imports nothing of hotlap.

Run by the Python that has TRL, with an order as JSON: `model`, `data`, `out`, `num_steps`, `seq_len`, `lr`, `rank`,
`num_threads`, and `adapter`, a folder of first values, or null for TRL's own.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    order = json.loads(sys.argv[1])
    began = since_start_s()
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    imported_s = since_start_s()
    torch.set_num_threads(order["num_threads"])
    seen = {"first_forward_s": 0.0, "losses": [], "step_s": [], "num_tokens": []}

    class Timed(SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):  # type: ignore[no-untyped-def]
            seen["first_forward_s"] = seen["first_forward_s"] or since_start_s()
            seen["num_tokens"].append(int(inputs["input_ids"].numel()))
            loss = super().training_step(model, inputs, num_items_in_batch)
            seen["losses"].append(float(loss))
            now_s = time.perf_counter()
            if self.last_s is not None:  # from the end of a step's backward to that of the next: all that a step costs
                seen["step_s"].append(now_s - self.last_s)
            self.last_s = now_s
            return loss

        last_s = None

    settings = SFTConfig(
        output_dir=order["out"] + "-trl",
        max_steps=order["num_steps"],
        per_device_train_batch_size=1,
        gradient_checkpointing=False,
        learning_rate=order["lr"],
        lr_scheduler_type="constant",
        packing=True,
        packing_strategy="bfd",
        max_length=order["seq_len"],
        completion_only_loss=True,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_steps=order["num_steps"],
        seed=7,
    )
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32)
    lora = LoraConfig(r=order["rank"], lora_alpha=2 * order["rank"], target_modules="all-linear", task_type="CAUSAL_LM")
    if order["adapter"] is not None:
        model, lora = PeftModel.from_pretrained(model, order["adapter"], is_trainable=True), None
    data = load_dataset("json", data_files=order["data"], split="train")
    trainer = Timed(model=model, args=settings, train_dataset=data, peft_config=lora)
    trainer.train()
    Path(order["out"]).write_text(json.dumps({**seen, "main_s": began, "imported_s": imported_s}))
    rows = trainer.train_dataset.select(range(min(order["num_steps"], len(trainer.train_dataset))))
    wanted = [{key: row[key] for key in ("input_ids", "seq_lengths", "labels")} for row in rows]
    Path(order["out"] + ".rows").write_text(json.dumps(wanted))


def since_start_s() -> float:
    """Seconds since the system started this process."""
    with Path("/proc/self/stat").open() as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
