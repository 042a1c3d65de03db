"""Write a dozen completions of the tiny test target: data for the CPU smoke run."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash.data.completions import write_completions
from dflash.data.generate import generate, meta

TARGET, DIRECTORY = Path(sys.argv[1]), Path(sys.argv[2])
NAMES = ("open", "read", "parse", "write", "split", "find", "load", "close", "send", "sort", "copy")

tokenizer = AutoTokenizer.from_pretrained(TARGET)
model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
prompts = [(name, tokenizer(f"def {name}_file(self):\n    ")["input_ids"]) for name in NAMES]
done = generate(model, tokenizer, prompts, source="smoke", max_new_tokens=32, batch_size=16)
write_completions(DIRECTORY, list(done), meta(TARGET, max_new_tokens=32))
