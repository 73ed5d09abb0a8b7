"""The examples of docs/clients.md, as they stand there; its versions are those that are tested."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from integration.clients.conftest import ROOT

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
NODE = Path(__file__).parent / "node"
# The client of each section, by the module that it brings.
MODULES = {
    "openai for Python": "openai",
    "openai for Node": None,
    "anthropic for Python": "anthropic",
    "LangChain": "langchain_openai",
    "LlamaIndex": "llama_index",
    "LiteLLM": "litellm",
    "llm": "llm",
    "lm-eval": "lm_eval",
    "GuideLLM": "guidellm",
}
SECTIONS = {section.partition("\n")[0]: section for section in re.split(r"(?m)^## ", PAGE)[1:]}


def blocks(section: str, language: str) -> list[str]:
    """Return the blocks of a language, each of which says what it prints after its last `#`."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", SECTIONS[section])


def run(command: list[str], program: str, folder: Path = ROOT) -> str:
    done = subprocess.run(
        command, input=program, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_section_is_run() -> None:
    assert set(SECTIONS) == set(MODULES)


def needs(section: str) -> None:
    module = MODULES[section]
    if module is not None and importlib.util.find_spec(module) is None:
        target = "clients-load" if section == "GuideLLM" else "clients-test"
        pytest.skip(f"{section} is not installed here; make {target} does it")


@pytest.mark.parametrize("section", [each for each in SECTIONS if blocks(each, "python")])
def test_the_python_prints_what_it_says(url: str, section: str) -> None:
    needs(section)
    (block,) = blocks(section, "python")
    promised = re.findall(r"(?m)^print\(.*\)  # (.+)$", block)
    printed = run([sys.executable, "-"], block.replace(ADDRESS, url))
    assert promised
    assert printed.splitlines() == promised


def test_the_javascript_prints_what_it_says(url: str) -> None:
    if shutil.which("node") is None or not (NODE / "node_modules").exists():
        pytest.skip("openai for Node is not installed; make clients-test does it")
    (block,) = blocks("openai for Node", "js")
    promised = re.findall(r"(?m)^console\.log\(.*\); // (.+)$", block)
    printed = run(["node", "--input-type=module", "-"], block.replace(ADDRESS, url), NODE)
    assert promised
    assert printed.splitlines() == promised


@pytest.mark.parametrize("section", [each for each in SECTIONS if blocks(each, "console")])
def test_the_commands_print_what_the_page_shows(
    url: str, section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(section)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    for text in blocks(section, "yaml"):
        (tmp_path / "extra-openai-models.yaml").write_text(text.replace(ADDRESS, url))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The capital of Peru is"}\n' * 40)
    (tmp_path / "juice").symlink_to(ROOT / "juice")
    (tmp_path / "integration").symlink_to(ROOT / "integration")
    for block in blocks(section, "console"):
        for shown in re.split(r"(?m)^\$ ", block)[1:]:
            command, _, output = shown.replace("\\\n", " ").partition("\n")
            printed = run(["sh", "-c", command.replace(ADDRESS, url)], "", tmp_path)
            if output:
                assert printed.strip().endswith(output.strip())


def rows() -> dict[str, str]:
    """Return the versions that the table names, by the client."""
    return dict(re.findall(r"(?m)^\| \[(.+?)\]\(#.*?\) \| (.+?) \|", PAGE))


def test_the_table_names_the_versions_that_are_installed() -> None:
    found = rows()
    assert len(found) == len(MODULES) + 1  # LangChain has two
    lock = json.loads((NODE / "package-lock.json").read_text())
    assert found.pop("openai (npm)") == lock["packages"]["node_modules/openai"]["version"]
    pinned = dict(re.findall(r"(?m)^(\S+)==(\S+)$", (ROOT / "constraints-clients.txt").read_text()))
    names = {name.lower().replace("_", "-"): each for name, each in pinned.items()}
    newest = re.findall(r"(?m)^openai==(\S+)$", (ROOT / "constraints.txt").read_text())
    for client, versions in found.items():
        expected = [names[client], *(newest if client == "openai" else [])]
        assert versions.split(", ") == expected
    assert version("openai") in found["openai"].split(", ")
