"""A tokenizer whose ids are byte values, with EOS 256 and a chat template. Needs no model."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from router.chat.template import ChatTemplate
from router.text.tokenizer import Tokenizer

EOS = 256
VOCAB_SIZE = 257
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(template: str = TEMPLATE, special: tuple[str, ...] = ()) -> Tokenizer:
    """`special`: more special tokens, with ids from 257 on."""
    # GPT-2's alphabet: the byte's own character if printable, else one past U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + position) for position, byte in enumerate(others)}
    vocab = {character: byte for byte, character in characters.items()}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<eos>", *special)]
    )
    return Tokenizer(rust, eos_token_ids=(EOS,), chat_template=ChatTemplate(template))
