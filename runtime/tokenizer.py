"""The engine's tokenizer: text to ids as the model was trained on it, and the chat template in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dsc.runtime.errors import DscError, nearest

Message = Mapping[str, Any]


class Tokenizer:
    """Reads a folder with tokenizer.json, and if present tokenizer_config.json and chat_template.jinja."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise DscError(
                "the engine has no tokenizer.json", where=str(folder), try_="prompts of token ids, without stop strings"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise DscError("is not a tokenizer", where=str(path), got=str(error)) from error
        self._folder = folder
        self.config = _read_config(folder / "tokenizer_config.json")
        self.bos_token = _content(self.config.get("bos_token"))
        self.eos_token = _content(self.config.get("eos_token"))

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows, added ones included; the model's may be padded to more."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str) -> int | None:
        """The id of one token's text, None where there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids of a text. Special tokens written out in it count as such.

        add_bos  begin with the beginning-of-text token, unless the text does; None: as the tokenizer's own files say,
                 `add_bos_token` of tokenizer_config.json before the post-processor of tokenizer.json
        """
        try:
            text.encode("utf-8")
        except (
            UnicodeEncodeError
        ) as error:  # half a surrogate pair, such as bytes of another encoding in a shell's argument
            raise DscError("the prompt is not text that UTF-8 can hold", got=str(error)) from error
        if add_bos is None:
            add_bos = self.config.get("add_bos_token")
        if add_bos is None:
            return list(self._tokenizer.encode(text, add_special_tokens=True).ids)
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        bos = self.token_id(self.bos_token) if add_bos and self.bos_token else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no whole character become U+FFFD."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation through the chat template, which writes its own special tokens."""
        return self.encode(self.apply_chat_template(messages, **variables), add_bos=False)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, template: str = "", **variables: Any
    ) -> str:
        """The text of a conversation.

        messages                dicts with `role` and `content`
        add_generation_prompt   end where the assistant's answer begins
        template                the name of one of several templates
        variables               whatever else the template reads (tools, ...)
        raises                  DscError when there is no template, or it refuses the messages
        """
        names = self._templates
        wanted = template or "default"
        if wanted not in names:
            what = f"the tokenizer has no chat template {wanted}" if names else "the tokenizer has no chat template"
            raise DscError(what, where=str(self._folder), wanted=", ".join(names), try_=nearest(wanted, names))
        given = {"bos_token": self.bos_token, "eos_token": self.eos_token, **variables}
        try:
            compiled = self._environment.from_string(names[wanted])
            return str(compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **given))
        except Exception as error:  # a program of somebody else's: it may divide by zero
            raise DscError("the chat template refuses the messages", where=str(self._folder), got=str(error)) from error

    @cached_property
    def _templates(self) -> dict[str, str]:
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            try:
                return {"default": file.read_text(encoding="utf-8")}
            except UnicodeDecodeError as error:
                raise DscError("is not UTF-8 text", where=str(file), got=str(error)) from error
        found = self.config.get("chat_template") or []
        if not isinstance(found, list):
            found = [{"name": "default", "template": found}]
        named = {}
        for entry in found:
            name, text = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "template"))
            if not isinstance(name, str) or not isinstance(text, str):
                where, wanted = str(self._folder / "tokenizer_config.json"), "a text, or a list of {name, template}"
                raise DscError("chat_template is no template", where=where, wanted=wanted)
            named[name] = text
        return named

    @cached_property
    def _environment(self) -> Any:
        """jinja2 with the same options, filter and functions as transformers gives to templates, and no way out."""
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        return environment


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DscError("is not valid JSON", where=str(path), got=str(error)) from error
    if not isinstance(config, dict):
        raise DscError("is not a JSON object", where=str(path), got=type(config).__name__)
    return config


def _content(token: Any) -> str:
    """A special token's text, written as a string or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return str(token) if token is not None else ""


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja's own filter escapes for HTML, which templates do not want.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
