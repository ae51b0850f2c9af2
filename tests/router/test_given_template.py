"""`router.chat_template:` in the YAML: a file in the place of the model's own template."""

import pytest

from core.errors import ModelError
from router.text.tokenizer import load_tokenizer
from support.models import smollm2_files

HI = [{"role": "user", "content": "hi"}]


def test_the_file_wins_over_the_model(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}<{{ m.content }}>{% endfor %}")
    given = load_tokenizer(smollm2_files(), str(file)).chat_template
    own = load_tokenizer(smollm2_files()).chat_template
    assert given is not None and own is not None
    assert given.render(HI) == "<|im_start|><hi>"
    assert own.render(HI) != given.render(HI)


def test_a_file_that_cannot_be_read_or_is_no_template_is_named(tmp_path):
    with pytest.raises(ModelError, match="none.jinja"):
        load_tokenizer(smollm2_files(), str(tmp_path / "none.jinja"))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match="not valid Jinja"):
        load_tokenizer(smollm2_files(), str(tmp_path / "bad.jinja"))
