"""Rules of the house that import-linter cannot say: who may import which part of an outside package."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("proto", "coordinator", "worker", "launch")

# An outside module, and the files or folders (relative to the root) that alone may import it.
OWNERS = {
    "torch": ("worker/", "launch/processes/elastic.py"),
    "torch.distributed": ("worker/links/", "launch/processes/elastic.py"),
    "triton": ("worker/kernels/",),
    "zmq": ("proto/channel/",),
    "msgspec.msgpack": ("proto/codec.py",),
    "tokenizers": ("coordinator/tokenizer/",),
    "sentencepiece": ("coordinator/tokenizer/",),
    "jinja2": ("coordinator/",),
    "gguf": ("coordinator/", "worker/", "proto/placement/quant_blocks.py"),
    "gguf.GGUFReader": (),
    "gguf.gguf_reader": (),
    "pickle": (),
}


def _sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def _imported_names(tree: ast.AST) -> set[str]:
    """Dotted names of all that is imported absolutely: `from a.b import c` gives a, a.b and a.b.c."""
    full: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            full |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and (dotted := _dotted(node)):
            full.add(dotted)
    return {
        ".".join(parts[:end]) for parts in (n.split(".") for n in full) for end in range(1, len(parts) + 1)
    }


def _dotted(node: ast.expr) -> str:
    """`torch.distributed` for that attribute chain, "" for what is not a chain of plain names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


@pytest.mark.parametrize("module", OWNERS)
def test_an_outside_module_is_imported_by_its_owner_alone(module: str) -> None:
    strangers = []
    for path in _sources():
        relative = path.relative_to(ROOT).as_posix()
        if not relative.startswith(OWNERS[module]) and module in _imported_names(ast.parse(path.read_text())):
            strangers.append(relative)
    assert strangers == [], f"{module} is imported by {strangers}; its owners are {OWNERS[module] or 'none'}"


def test_the_rule_sees_every_way_of_importing() -> None:
    tree = ast.parse("import a.b\nfrom c.d import e\nimport f\nf.g.h()\nfrom . import relative\n")
    assert {"a", "a.b", "c.d", "c.d.e", "f.g", "f.g.h"} <= _imported_names(tree)
    assert "relative" not in _imported_names(tree)


def test_inside_the_package_imports_are_relative() -> None:
    absolute = [
        path.relative_to(ROOT).as_posix()
        for path in _sources()
        if "gearshift" in _imported_names(ast.parse(path.read_text()))
    ]
    assert absolute == []
