"""From chat messages to the model's token ids: the model's own template, and no way out of one's turn.

A user who types `<|im_end|>` must not end a turn. Such text is marked before the template is rendered and afterwards
encoded as the plain characters it is, while the template's own control tokens stay what they are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.onnx.manifest import ModelDamaged

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_NAME = "tokenizer.json"

# Two private-use characters round a control token in a message. Those that a text brings itself only separate: a forged
# mark makes plain text of what stands inside, and what it parts is never joined again.
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"

#: OpenAI's roles as templates know them. `developer` is the newer name of `system`.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ChatPrompt:
    """Tokenizer and chat template of one model folder. `tokens` takes milliseconds for long texts: not on the event loop.

    Raises ModelDamaged when the folder's files cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            written = (folder / TOKENIZER_NAME).read_bytes()
            self.tokenizer = Tokenizer.from_buffer(written)
            # The same vocabulary, for which control tokens are only characters.
            self._plain = Tokenizer.from_buffer(written)
            self._template = (folder / TEMPLATE_NAME).read_text(encoding="utf-8")
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelDamaged(f"{folder}: tokenizer or chat template cannot be read; build the model again") from error
        for tokenizer in (self.tokenizer, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._plain.encode_special_tokens = True
        self._render = template_renderer()
        control = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]
        longest_first = "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True)) or "(?!)"
        self._control = re.compile(longest_first)
        self._suspicious = re.compile(f"{longest_first}|[{_OPEN}{_CLOSE}]")
        self._marked = re.compile(f"{_OPEN}({longest_first}){_CLOSE}|[{_OPEN}{_CLOSE}]")

    def tokens(self, turns: list[dict[str, str]]) -> list[int]:
        """Token ids of `turns` ({role, content}), ready for the model's answer.

        Raises ValueError when the template refuses the turns (say, for their order) or a text is no valid Unicode.
        """
        if not any(self._suspicious.search(turn["content"]) for turn in turns):
            return encode(self.tokenizer, self.text(turns))
        return self._encode_marked(self.text([turn | {"content": self._mark(turn["content"])} for turn in turns]))

    def text(self, turns: list[dict[str, str]]) -> str:
        """The rendered template."""
        try:
            rendered, _ = self._render([turns], chat_template=self._template, add_generation_prompt=True)
        except Exception as error:  # jinja's errors, whatever the template does
            # Templates quote messages in their errors: only the kind of error may leave.
            raise ValueError(f"the model's chat template refused the messages ({type(error).__name__})") from None
        text: str = rendered[0]
        return text

    def _mark(self, content: str) -> str:
        return self._control.sub(f"{_OPEN}\\g<0>{_CLOSE}", content)

    def _encode_marked(self, text: str) -> list[int]:
        """Marked control tokens as plain text, the rest as usual. A lone mark only separates."""
        ids: list[int] = []
        for place, piece in enumerate(self._marked.split(text)):
            if piece:
                tokenizer = self._plain if place % 2 else self.tokenizer
                ids += encode(tokenizer, piece)
        return ids


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` as it stands. Raises ValueError for text with lone surrogates.

    A batch of one, since only batches release the GIL: `encode` would stop the event loop for 50 ms per 100 kB.
    """
    try:
        (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    except TypeError:
        raise ValueError("a message is not valid Unicode text") from None
    return list(encoded.ids)


def template_renderer() -> Callable[..., tuple[list[str], Any]]:
    """Transformers' sandboxed renderer of chat templates: the reference for what templates may do.

    The first import takes half a second and 45 MB. Its note that torch is absent is meant for people who train models.
    """
    logger = logging.getLogger("transformers")

    def is_no_note(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(is_no_note)
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    finally:
        logger.removeFilter(is_no_note)
    render: Callable[..., tuple[list[str], Any]] = render_jinja_template
    return render
