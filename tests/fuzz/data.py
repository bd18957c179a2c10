"""Fuzzed data files, images, chat templates and model folders: a function checks one input, a strategy makes them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from PIL import Image

from engine.architecture.facts import from_config
from engine.architecture.lookup import find_config
from engine.architecture.model_folder import refuse_files, refuse_no_weights
from engine.data import bounds, template_limits
from engine.data.chat import ChatRenderer
from engine.data.chat_template import ChatTemplate, TemplateRefusal
from engine.data.images import TooManyPixels, decoded
from engine.data.prepare import prepare_data
from engine.data.recognise import NEEDS, OPTIONAL, recognise
from engine.data.records import ChatRecord, Screened
from engine.data.template_limits import MOST_ITEMS
from engine.errors import DataError, TunedeckError
from engine.model.reference import base_of_adapter, find_starting_weights
from tests.data.specs import CHATML, run_spec, tokenizer
from tests.fuzz.inputs import as_json, damaged, json_files, spliced, texts, values
from tests.fuzz.runs import refused

COLUMNS = sorted({name for table in (NEEDS, OPTIONAL) for names in table.values() for name in names})
ROWS: list[dict[str, Any]] = [
    {"text": "a"}, {"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "b", "input": "c"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"function":
     {"name": "f", "arguments": {"a": 1}}}]}, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "c"}],
     "tools": [{"type": "function", "function": {"name": "f"}}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
]  # fmt: skip
rows = st.sampled_from(ROWS).flatmap(damaged)

SOURCES = run_spec({"max_length": 64, "sources": [{"name": "s", "path": "x.jsonl"}]}).recipe.data.sources
RENDERER = ChatRenderer(tokenizer(CHATML), system_prompt=None, learn_all=False)


def row(given: Any, folder: Path) -> None:
    if not isinstance(given, dict):
        return
    try:
        chosen = recognise(list(given), SOURCES[0], has_template=True, markers=["<user>"])
    except DataError as error:
        refused(error)
        return
    record = chosen.record(given)
    if isinstance(record, ChatRecord):
        RENDERER.render(record)


def data_file(given: tuple[str, bytes], folder: Path) -> None:
    name, data = given
    path = folder / name
    path.write_bytes(data)
    spec = run_spec({"max_length": 64, "sources": [{"name": "s", "path": str(path)}]})
    try:
        report = prepare_data(spec, tokenizer()).report
    except TunedeckError as error:
        refused(error)
        return
    (count,) = report.sources
    assert count.read == count.kept + sum(count.dropped.values())


WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "a.jsonl": bytes, "a.json": bytes, "a.csv": bytes, "a.txt": bytes, "a.parquet": bytes, "a.jsonl.gz": gzip.compress,
    "a.jsonl.xz": lzma.compress, "a.jsonl.bz2": bz2.compress, "a.jsonl.zst": zlib.compress,
}  # fmt: skip
LINES = b"".join(as_json(each) + b"\n" for each in ({"text": "a"}, {"text": "b"}, {"text": "c" * 30}))
data_files = st.sampled_from(list(WRITERS)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.one_of(spliced(LINES).map(WRITERS[name]), spliced(WRITERS[name](LINES)), st.binary(max_size=60)),
    )
)


def screened_lines(data: bytes, folder: Path) -> None:
    """With small bounds: no line beyond one is kept, and JSON lines keep their numbers."""
    path = folder / "lines.jsonl"
    path.write_bytes(data)
    with mock.patch.object(bounds, "LINE_BYTES", 200), mock.patch.object(bounds, "DEPTH", 5):
        screened = Screened(path, path)
        kept = list(bounds._kept_lines(path, "json", 0, screened))
    assert all(len(line) <= 200 for line in kept)
    assert len(kept) == len(data.splitlines(keepends=True)) or b"\r" in data or b"\x0b" in data or b"\x0c" in data
    for line in kept:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        assert depth(found) <= 5, line


def depth(value: Any) -> int:
    """Levels of lists and objects."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


lines = st.lists(st.one_of(values.map(as_json), st.sampled_from(ROWS).map(as_json), st.binary(max_size=30)).map(
    lambda line: line + b"\n"), max_size=6).map(b"".join)  # fmt: skip
lines = st.one_of(lines, lines.flatmap(spliced))


def nesting(given: tuple[Any, list[int]], folder: Path) -> None:
    """The nesting of a text that comes in pieces is that of its JSON."""
    document, cuts = given
    text = as_json(document)
    counted = bounds.Nesting()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, stop in pairwise(places):
        counted.add(text[start:stop])
    assert counted.deepest == depth(document), places


def picture(data: bytes, folder: Path) -> None:
    with mock.patch("engine.data.images.IMAGE_PIXELS", 10_000):
        try:
            image = decoded(data)
        except (TooManyPixels, OSError, ValueError, SyntaxError):
            return
    assert image.width * image.height <= 10_000


def encoded(kind: str) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (8, 8)).save(written, kind)
    return written.getvalue()


pictures = st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"]).map(encoded).flatmap(spliced)


# models

PIECES = [
    "{{ messages[0]['content'] }}", "{% for m in messages %}", "{% endfor %}", "{% if tools %}", "{% endif %}",
    "{{ 7 * 7 }}", "{{ 'x' * 10 ** 9 }}", "{{ 10 ** 10 ** 10 }}", "{{ ''.__class__.__mro__ }}",
    "{{ self.__init__.__globals__ }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ messages.__class__ }}", "{% set x = messages.pop() %}", "{{ ('a' * 5000000).replace('a', 'b' * 100000) }}",
    "{{ '%1000000000d' % 1 }}", "{{ '{:>999999999}'.format('x') }}", "{{ 'x'.center(999999999) }}",
    "{{ 'x' | indent(999999999, true) }}", "{{ range(99999999) | list }}", "{% raw %}", "{% endraw %}",
    "{{ raise_exception('\x1b[31m') }}", "{% include '/etc/passwd' %}", "{% import 'x' as y %}",
    "{{ namespace(__class__=1) }}", "{{ messages | tojson(indent=99) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% generation %}", "{% endgeneration %}", "{{ bos_token }}",
    "{{ strftime_now('%' * 500) }}", "{{ [1] * 10 ** 8 }}", "{{ '{0.__class__.__init__}'.format(messages) }}",
    "{{ dict(a=1) | attr('__class__') }}", "{{ lipsum(n=3) }}", "<user>",
    "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(n=7) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n > 1 }}",
    "{{ ('a'*30000000).rfind('ab' + 'a'*15000000) }}", "{{ 1|round(1000000000,'ceil') }}",
    "{{ ([[1]*1000]*20000)|sum(start=[])|length }}", "{% set a=[0]*3000 %}{% set b=[a]*3000 %}{% set c=[b]*3000 %}",
    "{% set d=[0]*3000 %}{% set e=[d]*3000 %}{% set f=[e]*3000 %}{{ c == f }}", "{{ (messages * 9000) | tojson }}",
    "{{ messages | map('string') | join('x' * 100000) }}", "{% for i in range(10 ** 9) %}{% endfor %}",
]  # fmt: skip
templates = st.one_of(
    st.lists(st.one_of(st.sampled_from(PIECES), texts), max_size=4).map("".join),
    spliced(CHATML.encode()).map(lambda data: data.decode("utf-8", "replace")),
)
TOKENIZER = tokenizer(CHATML)


def template(text: str, folder: Path) -> None:
    TOKENIZER.chat_template = text or "x"
    try:
        with mock.patch.object(template_limits, "RENDER_CPU_SECONDS", 0.5):
            made = ChatTemplate(TOKENIZER)
            written = made.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None)
        assert len(written) <= MOST_ITEMS * 2
    except (TemplateRefusal, TunedeckError):
        return


SMALL = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16,
         "intermediate_size": 8, "architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "fp8"},
         "rope_scaling": {"type": "yarn", "factor": 2.0}, "num_key_value_heads": 1}  # fmt: skip
HEADER = as_json({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}})
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)
INDEX = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors"}}
ADAPTER = {"base_model_name_or_path": "builtin:tiny", "revision": None, "peft_type": "LORA", "r": 4,
           "target_modules": ["q_proj"], "auto_mapping": {"base_model_class": "os", "parent_library": "o"}}  # fmt: skip
model_files = st.one_of(
    st.tuples(st.just("config.json"), json_files(SMALL)),
    st.tuples(st.just("model.safetensors.index.json"), json_files(INDEX)),
    st.tuples(st.just("model.safetensors"), spliced(SAFETENSORS)),
    st.tuples(st.just("model.safetensors"), damaged(json.loads(HEADER)).map(as_json).map(
        lambda header: len(header).to_bytes(8, "little") + header + bytes(8))),
    st.tuples(st.just("adapter_config.json"), json_files(ADAPTER)),
)  # fmt: skip
SPEC = run_spec({"sources": [{"name": "s", "path": "x.jsonl"}]})


def model_folder(given: tuple[str, bytes], folder: Path) -> None:
    name, data = given
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        sound = {"config.json": as_json(SMALL), "model.safetensors": SAFETENSORS, "tokenizer.json": b"{}",
                 "model-1.safetensors": SAFETENSORS, "tokenizer_config.json": b"{}"}  # fmt: skip
        for each, content in {**sound, name: data}.items():
            (place / each).write_bytes(content)
        model = SPEC.recipe.model.model_copy(update={"id": str(place), "init": "pretrained"})
        spec = SPEC.model_copy(update={"recipe": SPEC.recipe.model_copy(update={"model": model})})
        for look in (
            lambda: refuse_files(spec, find_config(str(place))),
            lambda: from_config(find_config(str(place))),
            lambda: refuse_no_weights(model),
            lambda: find_starting_weights(model),
            lambda: base_of_adapter(place) if name.startswith("adapter") else None,
        ):
            try:
                look()
            except TunedeckError as error:
                refused(error)
    finally:
        shutil.rmtree(place)
