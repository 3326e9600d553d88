"""Text to ids as the model was trained on, and chat templates in a sandbox."""

import json
import shutil
from pathlib import Path

import pytest

from dsc.runtime.errors import DscError
from dsc.runtime.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "examples" / "tiny-r1"
BOS = "<｜begin▁of▁sentence｜>"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "é"}]


def with_config(folder: Path, **changes) -> Tokenizer:
    shutil.copy(TINY / "tokenizer.json", folder)
    config = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer(folder)


def test_beginning_of_text_as_the_config_says(tmp_path):
    tokenizer = Tokenizer(TINY)
    bos = tokenizer.token_id(BOS)
    assert bos == 0
    plain = tokenizer.encode("def f", add_bos=False)
    assert plain
    assert tokenizer.encode("def f") == [bos, *plain]
    assert tokenizer.encode(BOS + "def f") == [bos, *plain]
    assert with_config(tmp_path, add_bos_token=False).encode("def f") == plain
    # Without the key the post-processor of tokenizer.json decides; this one has none.
    assert with_config(tmp_path, add_bos_token=None).encode("def f") == plain


def test_special_tokens_written_as_objects(tmp_path):
    tokenizer = with_config(tmp_path, bos_token={"content": BOS, "lstrip": False})
    assert tokenizer.encode("x")[0] == 0
    assert tokenizer.decode([0, *tokenizer.encode("x", add_bos=False)]) == "x"
    assert tokenizer.decode([0], skip_special_tokens=False) == BOS


def test_chat_equals_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(TINY)
    ours = Tokenizer(TINY)
    for prompt in (True, False):
        text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
        assert ours.apply_chat_template(CHAT, add_generation_prompt=prompt) == text
        assert ours.encode_chat(CHAT, add_generation_prompt=prompt) == theirs.encode(text, add_special_tokens=False)


def test_template_file_and_named_templates(tmp_path):
    tokenizer = with_config(
        tmp_path, chat_template=[{"name": "default", "template": "A"}, {"name": "tools", "template": "B"}]
    )
    assert tokenizer.apply_chat_template(CHAT) == "A"
    assert tokenizer.apply_chat_template(CHAT, template="tools") == "B"
    with pytest.raises(DscError, match="no chat template tool\n  wanted  default, tools\n  try     tools"):
        tokenizer.apply_chat_template(CHAT, template="tool")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}\n  {% if m.content == 'é' %}{% break %}{% endif %}\n{{ m | tojson }}\n{% endfor %}\n",
        encoding="utf-8",
    )
    assert Tokenizer(tmp_path).apply_chat_template(CHAT[1:]) == '{"role": "assistant", "content": "Yes?"}\n'


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    ],
)
def test_templates_that_refuse_or_reach_out(tmp_path, template, reason):
    tokenizer = with_config(tmp_path, chat_template=template)
    with pytest.raises(DscError, match=reason) as caught:
        tokenizer.apply_chat_template(CHAT)
    assert "the chat template refuses the messages" in str(caught.value)


def test_no_template_and_no_tokenizer(tmp_path):
    with pytest.raises(DscError, match="the tokenizer has no chat template"):
        with_config(tmp_path, chat_template=None).apply_chat_template(CHAT)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DscError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
