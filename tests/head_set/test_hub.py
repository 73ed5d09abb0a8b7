"""Head sets on the hub: pulled byte for byte as they were pushed, or refused in one clear line.

The hub is `fake_hub` on loopback; the client is huggingface_hub's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from juice.errors import HeadSetError, HeadSetNotFoundError, JuiceError, OutputError
from juice.head_set.head_set import HeadSet
from juice.head_set.scores import HeadScores
from tests.support import fake_hub
from tests.support.commands import juice
from tests.support.head_sets import MEASURED, content, names_in, scored, sealed
from tests.support.serving import free_port

# The client uploads in a way that a newer httpx deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
SHIPPED = Path("head_sets/mini/context")
UNTUNED = Path("head_sets/google--gemma-2-2b/parametric")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hub.Hub]:
    """Point this process's client, which has read the environment, to a fresh hub and cache."""
    with fake_hub.hub() as server:
        replaced = {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield server


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def holding(hub: fake_hub.Hub, name: str, files: dict[str, bytes], **kind: bool) -> fake_hub.Repo:
    hub.repos[name] = fake_hub.Repo(**kind)
    hub.repos[name].commit(files)
    return hub.repos[name]


def name_of(scores: HeadScores) -> str:
    return f"scores-{scores.sha256()[7:19]}.safetensors"


def test_a_local_folder_is_loaded_as_by_load(tmp_path: Path) -> None:
    scored().save(tmp_path / "deep" / "context")
    for place, subfolder in (
        (tmp_path / "deep" / "context", None),
        (tmp_path, "deep/context"),
        (str(tmp_path), "deep/context"),
    ):
        assert (
            HeadSet.from_pretrained(place, subfolder=subfolder).model_dump()
            == HeadSet.load(tmp_path / "deep" / "context").model_dump()
        )
    with pytest.raises(HeadSetNotFoundError, match="no folder"):
        HeadSet.from_pretrained(tmp_path / "nowhere")


def test_what_is_pushed_is_pulled_byte_for_byte(hub: fake_hub.Hub, tmp_path: Path) -> None:
    url = HeadSet.load(SHIPPED).push_to_hub(
        "me/context", token="writer", commit_message="A first try"
    )
    repo = hub.repos["me/context"]
    assert url == f"{hub.url}/me/context/commit/{repo.branches['main']}"
    assert repo.messages == ["initial commit", "A first try"]
    assert repo.files.keys() == {"README.md", *names_in(SHIPPED)}
    pulled = HeadSet.from_pretrained("me/context")
    pulled.save(tmp_path / "context")
    assert (
        files_in(tmp_path / "context")
        == files_in(SHIPPED)
        == {name: repo.files[name] for name in names_in(SHIPPED)}
    )


def test_the_local_path_of_a_model_is_not_published(hub: fake_hub.Hub) -> None:
    head_set = HeadSet.load(SHIPPED)
    moved = head_set.model_copy(
        update={"model": head_set.model.model_copy(update={"id": "/home/alice/private/my-model"})}
    )
    moved.push_to_hub("me/context", token="writer")
    repo = hub.repos["me/context"]
    assert not any(b"alice" in content for content in repo.files.values())
    assert HeadSet.from_pretrained("me/context").model.id == "my-model"
    assert b"# context: my-model toward context" in repo.files["README.md"]


def test_scores_that_a_newer_set_lacks_are_removed_in_the_same_commit(hub: fake_hub.Hub) -> None:
    scored().push_to_hub("me/set", token="writer")
    scored().model_copy(update={"scores": None, "scores_sha256": None}).push_to_hub(
        "me/set", token="writer"
    )
    assert hub.repos["me/set"].files.keys() == {"README.md", "head_set.json"}
    assert len(hub.repos["me/set"].commits) == 3
    assert HeadSet.from_pretrained("me/set").scores is None


def test_private_repositories_stay_private_and_open_to_their_owners(hub: fake_hub.Hub) -> None:
    scored().push_to_hub("me/secret", private=True, token="writer")
    assert hub.repos["me/secret"].private
    assert HeadSet.from_pretrained("me/secret", token="writer").name == "context"
    with pytest.raises(HeadSetNotFoundError, match="or it is private"):
        HeadSet.from_pretrained("me/other-secret", token="reader")


def test_the_revision_and_subfolder_asked_for_are_pulled(hub: fake_hub.Hub) -> None:
    def named(source: str) -> bytes:
        return sealed(content(source=source)).encode()

    repo = holding(
        hub, "me/many", {"head_set.json": named("old"), "sub/one/head_set.json": named("below")}
    )
    old = repo.branches["main"]
    repo.commit({"head_set.json": named("new")})
    assert HeadSet.from_pretrained("me/many").source == "new"
    assert HeadSet.from_pretrained("me/many", revision=old).source == "old"
    assert HeadSet.from_pretrained("me/many", revision=old, subfolder="sub/one/").source == "below"


def test_what_was_pulled_once_is_available_without_a_network(
    hub: fake_hub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding(hub, "me/set", {"head_set.json": sealed(content()).encode()})
    HeadSet.from_pretrained("me/set")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert HeadSet.from_pretrained("me/set").name == "context"
    with pytest.raises(HeadSetNotFoundError, match="HF_HUB_OFFLINE"):
        HeadSet.from_pretrained("me/other")
    with pytest.raises(OutputError, match="HF_HUB_OFFLINE"):
        scored().push_to_hub("me/set", token="writer")
    assert len(hub.asked) == asked


# What is pulled, with which options, the error's class and a part of it.
REFUSALS: dict[str, tuple[str, dict[str, Any], type[JuiceError], str]] = {
    "missing": ("me/none", {}, HeadSetNotFoundError, "no repository me/none, or it is private"),
    "missing_for_a_user": (
        "me/none",
        {"token": "reader"},
        HeadSetNotFoundError,
        "no repository me/none",
    ),
    "private": ("me/private", {}, HeadSetNotFoundError, "or it is private"),
    "gated": ("me/gated", {}, HeadSetNotFoundError, "is gated: ask for access.*HF_TOKEN"),
    "gated_for_a_user": (
        "me/gated",
        {"token": "reader"},
        HeadSetNotFoundError,
        "is gated: ask for access",
    ),
    "wrong_token": ("me/none", {"token": "forged"}, HeadSetNotFoundError, "valid token"),
    "no_token_where_one_is_asked_for": (
        "me/none",
        {"token": True},
        HeadSetNotFoundError,
        "valid token",
    ),
    "no_revision": ("me/empty", {"revision": "v9"}, HeadSetNotFoundError, "no revision 'v9'"),
    "no_head_set": ("me/empty", {}, HeadSetNotFoundError, r"me/empty has no head_set\.json"),
    "no_subfolder": (
        "me/good",
        {"subfolder": "sub"},
        HeadSetNotFoundError,
        r"me/good has no sub/head_set\.json",
    ),
    "no_id": ("a/b/c", {}, HeadSetNotFoundError, "owner/name"),
    "no_json": ("me/cut", {}, HeadSetError, "me/cut cannot be used.*not JSON"),
    "out_of_range": ("me/wild", {}, HeadSetError, "L3H0 is out of range"),
    "changed_scores": ("me/changed", {}, HeadSetError, "hash.*download it again"),
    "lost_scores": ("me/lost", {}, HeadSetError, "there is no .*scores-[0-9a-f]{12}.safetensors"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_pulled_is_refused_with_what_to_do(hub: fake_hub.Hub, name: str) -> None:
    good = sealed(content()).encode()
    holding(hub, "me/private", {"head_set.json": good}, private=True)
    holding(hub, "me/gated", {"head_set.json": good}, gated=True)
    holding(hub, "me/empty", {"config.json": b"{}"})
    holding(hub, "me/good", {"head_set.json": good})
    holding(hub, "me/cut", {"head_set.json": good[:100]})
    holding(
        hub,
        "me/wild",
        {
            "head_set.json": sealed(
                content(methods={"juice": {"heads": {"plus": [[3, 0]], "minus": []}}})
            ).encode()
        },
    )
    scores = scored().scores
    assert scores is not None
    hashed = sealed(content(scores_sha256=scores.sha256())).encode()
    holding(hub, "me/lost", {"head_set.json": hashed})
    holding(
        hub,
        "me/changed",
        {"head_set.json": hashed, name_of(scores): scores.to_bytes()[:-1] + b"\0"},
    )
    repo_id, options, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message) as raised:
        HeadSet.from_pretrained(repo_id, **options)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)


def push_of(repo_id: str, **options: Any) -> Callable[[], str]:
    return lambda: scored().push_to_hub(repo_id, **options)


@pytest.mark.parametrize(
    ("push", "named"),
    [
        (push_of("me/new"), "HF_TOKEN to a valid token"),
        (push_of("me/new", token="reader"), "HF_TOKEN to a token that may"),
        (push_of("me/there"), "HF_TOKEN to a valid token"),
        (push_of("me/there", token="reader"), "HF_TOKEN to a token that may"),
        (push_of("me/there", token="writer", revision="v9"), "no revision 'v9'"),
        (push_of("a/b/c", token="writer"), "owner/name"),
    ],
)
def test_what_cannot_be_pushed_is_refused_and_changes_nothing(
    hub: fake_hub.Hub, push: Callable[[], str], named: str
) -> None:
    repo = holding(hub, "me/there", {"head_set.json": b"old"})
    with pytest.raises(OutputError, match=named):
        push()
    assert hub.repos.keys() == {"me/there"}
    assert len(repo.commits) == 1


@pytest.mark.usefixtures("hub")
def test_a_hub_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(HeadSetNotFoundError, match="cannot be reached"):
        HeadSet.from_pretrained("me/set")
    with pytest.raises(OutputError, match="cannot be reached"):
        scored().push_to_hub("me/set", token="writer")


def test_a_damaged_download_is_replaced_by_a_forced_one(hub: fake_hub.Hub) -> None:
    scored().push_to_hub("me/set", token="writer")
    HeadSet.from_pretrained("me/set")
    cached = next(
        Path(constants.HF_HUB_CACHE).glob("**/snapshots/*/scores-*.safetensors")
    ).resolve()
    cached.write_bytes(cached.read_bytes()[:-1] + b"\0")
    with pytest.raises(HeadSetError, match=r"hash.*--force"):
        HeadSet.from_pretrained("me/set")
    assert HeadSet.from_pretrained("me/set", force_download=True).scores is not None


def test_the_card_states_what_the_set_is_and_how_to_use_it(hub: fake_hub.Hub) -> None:
    HeadSet.load(SHIPPED).push_to_hub("me/tuned", token="writer")
    tuned = ModelCard(hub.repos["me/tuned"].files["README.md"].decode())
    assert tuned.data.library_name == "juice"
    assert tuned.data.base_model is None  # `mini` is not a hub id
    assert {"head-set", "context"} <= set(tuned.data.tags)
    head_set = HeadSet.load(SHIPPED)
    accuracy = head_set.metrics["validation_juice"]["accuracy"]["substitution"]
    wanted = (
        *map(str, head_set.heads.plus),
        head_set.model.fingerprint,
        str(head_set.betas()),
        "by attribution on 16 examples (seed 0)",
        f"- {head_set.gate().rules[0]}",
        f"{accuracy:.3f}",
        'from_pretrained("me/tuned")',
        "curl",
    )
    assert [part for part in wanted if part not in tuned.text] == []
    HeadSet.load(UNTUNED).push_to_hub("me/untuned", token="writer")
    untuned = ModelCard(hub.repos["me/untuned"].files["README.md"].decode())
    assert untuned.data.base_model == "google/gemma-2-2b"
    assert "beta_plus=1.0" in untuned.text
    assert "What it did" not in untuned.text


def test_the_card_states_the_harm_to_ordinary_text(hub: fake_hub.Hub) -> None:
    measured = HeadSet.parse(content(metrics={"validation_juice": MEASURED}), "test")
    measured.push_to_hub("me/measured", token="writer")
    card = ModelCard(hub.repos["me/measured"].files["README.md"].decode()).text
    (harm,) = re.findall(r"ordinary text, without a gate:\n\n((?:- .*\n)+)", card)
    assert harm.splitlines() == [
        "- strength 0.5: 0.011 nats a token, perplexity x 1.01",
        "- strength 1: 0.044 nats a token, perplexity x 1.07",
        "- strength 2: 0.179 nats a token, perplexity x 1.32",
    ]
    kept = "where juice should change nothing: clean 0.95 -> 0.80, irrelevant 0.90 -> 0.20."
    assert kept in card


def test_the_commands_push_and_pull(tmp_path: Path) -> None:
    with fake_hub.hub() as hub:
        places = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        done = juice(
            "push", str(SHIPPED.resolve()), "me/context", "--private", HF_TOKEN="writer", **places
        )
        assert done.returncode == 0, done.stderr
        assert (
            done.stdout.strip()
            == f"{hub.url}/me/context/commit/{hub.repos['me/context'].branches['main']}"
        )
        assert hub.repos["me/context"].private
        done = juice(
            "pull",
            "me/context",
            "--out",
            str(tmp_path / "sets"),
            "--json",
            HF_TOKEN="writer",
            **places,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["path"] == str(tmp_path / "sets" / "mini" / "context")
        assert done.stderr == ""
        assert files_in(tmp_path / "sets" / "mini" / "context") == files_in(SHIPPED)
