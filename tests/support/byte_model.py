"""A tiny Llama with random weights in a folder with the byte tokenizer, as a router needs one."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.byte_tokenizer import TEMPLATE, VOCAB_SIZE, byte_tokenizer


def save_byte_model(folder: Path, max_model_len: int = 512) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_model_len,
        eos_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer()._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
