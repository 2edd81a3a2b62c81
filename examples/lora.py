"""LoRA by Hugging Face peft: a GPT-2 whose base is frozen, with checkpoints of the adapter alone.

python examples/lora.py --dropout 0.1        # and with a launcher, or options, as gpt2.py
"""

from gpt2 import make_model, read_arguments, train
from peft import LoraConfig, get_peft_model

arguments = read_arguments(__doc__)
base = make_model(arguments)  # yours: GPT2LMHeadModel.from_pretrained(...)
config = LoraConfig(r=4, lora_dropout=arguments.dropout, target_modules=["c_attn", "c_proj"])
model = get_peft_model(base, config, autocast_adapter_dtype=False)
train(model, arguments, save_frozen=False)
