"""LoRA by the Trainer of Hugging Face transformers, on a GPT-2 whose base is frozen.

trainer_one_device.py is for one device, trainer.py for any number; see the difference by
diff examples/trainer_one_device.py examples/trainer.py
hvdtrain launch -np 3 -- python examples/trainer.py
They need `pip install 'hvdtrain[peft]'`, and download nothing.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

EPOCHS, BATCH_SIZE, IGNORED, END = 2, 12, -100, 0


def read(number):
    """Return the bytes of a line: of 6 to 77, so that batches are ragged."""
    words = (f"{number * factor}" for factor in range(1, 2 + number % 19))
    return torch.tensor([*" ".join(words).encode(), END])


def collate(lines):
    """Return padded bytes, which of them are real, and labels: IGNORED is not learned."""
    labels = pad_sequence(lines, True, IGNORED)
    bytes_of_lines = pad_sequence(lines, True, END)
    return {"input_ids": bytes_of_lines, "attention_mask": labels != IGNORED, "labels": labels}


def loss_function(outputs, labels, num_items_in_batch):
    """Return the sum of the losses by the tokens of all devices; in the type of the model."""
    scores, following = outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:]
    loss = cross_entropy(scores, following, reduction="sum", ignore_index=IGNORED)
    return loss / num_items_in_batch


torch.manual_seed(0)
sizes = {"vocab_size": 256, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
config = GPT2Config(**sizes, **drop, bos_token_id=END, eos_token_id=END)
base = GPT2LMHeadModel(config).double()  # yours: GPT2LMHeadModel.from_pretrained(...)
adapter = LoraConfig(r=4, target_modules=["c_attn", "c_proj"])
model = get_peft_model(base, adapter, autocast_adapter_dtype=False)
lines = [read(number) for number in range(120)]

arguments = TrainingArguments(
    output_dir="runs/trainer",
    num_train_epochs=EPOCHS,
    learning_rate=0.01,
    per_device_train_batch_size=BATCH_SIZE,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model, arguments, collate, lines, compute_loss_func=loss_function)
trainer.train()

if trainer.is_world_process_zero():
    batch = {name: values.to(model.device) for name, values in collate(lines).items()}
    tokens = (batch["labels"][:, 1:] != IGNORED).sum()
    with torch.no_grad():
        print(f"final loss {loss_function(model(**batch), batch['labels'], tokens):.12f}")
