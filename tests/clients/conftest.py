"""One live deployment in float32 of the real small model, with a chat template that has tools."""

from collections.abc import Iterator

import pytest

from support.live import Live, deployment

# SmolLM2's own template has no tools. This one writes them as Hermes and Qwen do.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}For each call write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    for package in ("langchain_openai", "lm_eval"):
        pytest.importorskip(package, reason=f"{package} is not installed: the extra `clients`")
    folder = tmp_path_factory.mktemp("clients")
    template = folder / "tools.jinja"
    template.write_text(TEMPLATE)
    settings = (
        "dtype=float32",
        "engine.num_kv_blocks=512",
        "router.embeddings=mean",
        f"router.chat_template={template}",
    )
    with deployment("local.yaml", folder / "up.log", settings) as live:
        yield live
        live.wait_idle()
